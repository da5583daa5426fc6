// Evidence: the story of a restart, logs and stacks, in a dialog.

import {make} from "./dom.js";

async function ask(path) {
  const answer = await fetch(path).catch(() => null);
  if (answer === null) return {problem: "no connection"};
  return answer.ok ? {told: await answer.json()} : {problem: answer.status === 404 ? "there is none" : await answer.text()};
}

function named(file) {
  return file.replace(/^rank(\d+)\.txt$/, "rank $1");
}

export class Evidence {
  constructor(api) {
    this.api = api;
    this.title = make("h2", {id: "evidence-title"});
    this.choices = make("p", {class: "choices"});
    this.text = make("pre", {tabindex: "0", "aria-labelledby": "evidence-title"});
    const close = make("button", {type: "button", class: "close", text: "Close", onclick: () => this.dialog.close()});
    this.dialog = make("dialog", {"aria-labelledby": "evidence-title"}, make("div", {class: "row"}, this.title, close), this.choices, this.text);
    this.lists = make("div", {class: "choices"});
    const look = make("button", {type: "button", text: "Look for logs and stacks", onclick: () => this.list()});
    this.box = make("section", {id: "evidence", "aria-labelledby": "logs-title"},
      make("h2", {id: "logs-title", text: "Logs and stacks"}), look, this.lists, this.dialog);
  }

  async open(what) {
    this.choices.replaceChildren();
    if ("story" in what) await this.story(what.story);
    else if ("stacks" in what) await this.stacks(what.stacks.split("/").at(-1));
    else await this.logs(what.logs, what.rank);
  }

  async story(number) {
    const {told, problem} = await ask(`${this.api}/restarts/${number}`);
    this.show(`Restart ${number}`, problem ?? told.text);
  }

  async logs(generation, rank) {
    const {told, problem} = await ask(`${this.api}/evidence`);
    const found = told?.logs.find((one) => one.generation === generation);
    if (!found || !found.ranks.length) {
      this.show(`Logs of generation ${generation}`, problem ?? "this generation has written nothing, or its logs are gone");
      return;
    }
    this.choices.replaceChildren(...found.ranks.map((one) => this.choice(`rank ${one}`, () => this.log(generation, one))));
    await this.log(generation, found.ranks.includes(rank) ? rank : found.ranks[0]);
  }

  async log(generation, rank) {
    const {told, problem} = await ask(`${this.api}/logs/${generation}/${rank}`);
    this.show(`Log of rank ${rank}, generation ${generation}: its end`, problem ?? told.join("\n"));
    this.text.scrollTop = this.text.scrollHeight;
  }

  async stacks(dump) {
    const {told, problem} = await ask(`${this.api}/evidence`);
    const found = told?.stacks.find((one) => one.dump === dump);
    if (!found || !found.files.length) {
      this.show("Stacks", problem ?? "there are none any more");
      return;
    }
    this.choices.replaceChildren(...found.files.map((one) => this.choice(named(one), () => this.stack(dump, one))));
    await this.stack(dump, found.files[0]);
  }

  async stack(dump, file) {
    const {told, problem} = await ask(`${this.api}/stacks/${encodeURIComponent(dump)}/${encodeURIComponent(file)}`);
    this.show(`Stacks of ${named(file)}, ${dump}`, problem ?? told.join("\n"));
  }

  choice(text, onclick) {
    return make("button", {type: "button", text, onclick});
  }

  show(title, text) {
    this.title.textContent = title;
    this.text.textContent = text;
    if (!this.dialog.open) this.dialog.showModal();
  }

  async list() {
    const {told, problem} = await ask(`${this.api}/evidence`);
    if (problem) {
      this.lists.replaceChildren(make("p", {class: "problem", text: problem}));
      return;
    }
    const logs = [...told.logs].reverse().map((one) =>
      this.choice(`logs of generation ${one.generation}`, () => this.open({logs: one.generation})));
    const stacks = told.stacks.map((one) => this.choice(`stacks ${one.dump}`, () => this.open({stacks: one.dump})));
    const none = make("p", {class: "quiet", text: "No rank has written anything, and nothing hung."});
    this.lists.replaceChildren(...(logs.length + stacks.length ? [...stacks, ...logs] : [none]));
  }
}
