// The page: which view it is, and its live stream. Each view draws one document again and again.

import {hasEnded, make, tick} from "./dom.js";
import {drawList} from "./list.js";
import {drawRun} from "./run.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
const where = document.getElementById("where");

const matched = /^\/runs\/([^/]+)$/.exec(location.pathname);
const api = matched ? `/api/runs/${matched[1]}` : "/api";
const draw = matched ? drawRun(main, api) : drawList(main);
if (matched) where.textContent = nameOf(matched[1]);

function nameOf(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function say(text, kind) {
  link.textContent = text;
  link.className = kind;
}

async function explain() {
  const answer = await fetch(matched ? api : "/api/runs").catch(() => null);
  if (answer === null || answer.ok || answer.status >= 500) return;
  say("", "calm");
  main.replaceChildren(make("p", {class: "problem", role: "alert", text: await answer.text()}));
}

let isOver = false;

main.classList.add("waiting");
const stream = new EventSource(`${api}/changes`);
stream.onerror = () => {
  // A run serves its page itself, and the page ends with it.
  if (isOver) return say("○ the run is over, and so is its page: elastic dashboard shows it again", "calm");
  say("○ no connection: what is shown is old; elastic dashboard shows runs whose own page is gone", "bad");
  main.classList.add("stale");
  explain();
};
stream.onmessage = (message) => {
  const told = JSON.parse(message.data);
  isOver = hasEnded(told.status?.state);
  main.classList.remove("waiting", "stale");
  say("● live", "good");
  draw(told);
  main.dataset.drawn = String(Number(main.dataset.drawn ?? 0) + 1);
};
setInterval(tick, 1000);
