// The list of runs: a row each, the one that spoke last first.

import {DASH, ago, make, number, percent, state, table, whole} from "./dom.js";

export function drawList(main) {
  const place = make("div");
  main.replaceChildren(make("h1", {text: "Runs"}), place);
  document.title = "Runs – elastic";
  return (told) => {
    document.getElementById("where").textContent = told.storage;
    const hasProblem = told.runs.some((run) => run.problem);
    const columns = [
      ["Run", false, (run) => make("a", {href: `/runs/${encodeURIComponent(run.directory)}`, text: run.directory})],
      ["State", false, (run) => state(run.state)],
      ["Step", true, (run) => whole(run.step) + (run.until === null ? "" : ` of ${run.until}`)],
      ["Loss", true, (run) => number(run.loss, 4)],
      ["Workers", true, (run) => whole(run.world_size)],
      ["Restarts", true, (run) => whole(run.restarts)],
      ["Goodput", true, (run) => percent(run.goodput)],
      ["Last word", true, (run) => ago(run.last_word_s)],
      ["Begun", true, (run) => ago(run.created_s)],
    ];
    if (hasProblem) columns.push(["Problem", false, (run) => run.problem || DASH]);
    const focused = document.activeElement?.getAttribute("href");
    place.replaceChildren(told.runs.length
      ? table("Runs", columns, told.runs)
      : make("p", {class: "quiet", text: "There is no run below this storage yet."}));
    if (focused) {
      [...place.querySelectorAll("a")].find((a) => a.getAttribute("href") === focused)?.focus();
    }
  };
}
