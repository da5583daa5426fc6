// The table of restarts: cause, cost, phases as a small bar, and the story one click away.

import {DASH, count, make, moment, number, seconds, table, whole} from "./dom.js";

const MOST_AT_FIRST = 20;
const OUTCOMES = {
  "under way": "no new step so far", "submitted again": "no new step before it was submitted again",
  failed: "the run failed", stopped: "the run was stopped", finished: "the run finished",
};
// Colour and letter: who cannot tell colours apart reads the letters.
const PHASES = {
  diagnose: ["detect", "c1"], stop: ["stop", "c2"], join: ["join", "c3"], place: ["place", "c4"],
  start: ["start", "c5"], connect: ["connect", "c6"], build: ["build", "c7"], load: ["load", "c8"],
  first_step: ["first step", "c3"], wait: ["wait", "c2"], take_over: ["take over", "c1"],
};

let showsAll = false;

function phases(one) {
  const told = Object.entries(one.phases_s).filter(([, tookS]) => tookS >= 0.0005);
  if (!told.length) return "–";
  const words = told.map(([name, tookS]) => `${PHASES[name]?.[0] ?? name} ${seconds(tookS)}`).join(", ");
  const bar = make("span", {class: "bar", role: "img", "aria-label": words, title: words});
  for (const [name, tookS] of told) {
    const [label, colour] = PHASES[name] ?? [name, "c2"];
    const piece = make("span", {class: `piece ${colour}`, text: label[0]});
    piece.style.flexGrow = String(tookS);
    bar.append(piece);
  }
  return make("span", {class: "phases"}, bar, make("small", {text: longest(told)}));
}

function longest(told) {
  const [name, tookS] = told.reduce((one, other) => (other[1] > one[1] ? other : one));
  return `most: ${PHASES[name]?.[0] ?? name} ${seconds(tookS)}`;
}

function legend(restarts) {
  const names = new Set(restarts.flatMap((one) => Object.keys(one.phases_s)));
  const keys = [...names].map((name) => {
    const [label, colour] = PHASES[name] ?? [name, "c2"];
    return make("span", {class: "key"}, make("span", {class: `piece box ${colour}`, "aria-hidden": "true", text: label[0]}), ` ${label}`);
  });
  return keys.length ? make("p", {class: "legend"}, make("span", {class: "quiet", text: "Phases:"}), ...keys) : null;
}

function cause(one) {
  const sign = one.is_failure || one.outcome === "failed" ? "▼" : "■";
  return make("span", {class: one.is_failure || one.outcome === "failed" ? "cause bad" : "cause good"},
    make("span", {"aria-hidden": "true", text: `${sign} `}), make("b", {text: one.causes.join(", ")}));
}

function why(one) {
  const outcome = OUTCOMES[one.outcome];
  const lines = [make("span", {class: "why", text: one.reason})];
  if (outcome) lines.unshift(make("b", {text: `[${outcome}] `}));
  return make("span", {}, ...lines);
}

export function drawRestarts(doc, open) {
  if (!doc.restarts.length) return make("p", {class: "quiet", text: "No restarts."});
  const {totals} = doc;
  const sum = Object.entries(totals.by_cause).map(([name, num]) => `${name} ${num}`).join(", ");
  const newest = [...doc.restarts].reverse();
  const shown = showsAll ? newest : newest.slice(0, MOST_AT_FIRST);
  const logs = (one) => one.generation === null ? null : make("button", {
    type: "button", "data-key": `logs-${one.number}`, text: "logs",
    "aria-label": `Logs of generation ${one.generation}`,
    onclick: () => open({logs: one.generation, rank: one.world_rank}),
  });
  const stacks = (one) => !one.stacks ? null : make("button", {
    type: "button", "data-key": `stacks-${one.number}`, text: "stacks",
    "aria-label": `Stacks of restart ${one.number}`, onclick: () => open({stacks: one.stacks}),
  });
  const columns = [
    ["N", true, (one) => one.number],
    ["When (UTC)", false, (one) => make("span", {class: "when", text: moment(one.time_s)})],
    ["Cause", false, cause],
    ["Step", true, (one) => whole(one.step)],
    ["Lost", true, (one) => whole(one.lost_steps)],
    ["From", false, (one) => one.source || DASH],
    ["Took", true, (one) => seconds(one.took_s)],
    ["Workers", true, (one) => `${whole(one.old_world_size)} → ${whole(one.new_world_size)}`],
    ["Phases", false, phases],
    ["Reason", false, why],
    ["Evidence", false, (one) => make("span", {class: "buttons"}, make("button", {
      type: "button", "data-key": `story-${one.number}`, text: "story",
      "aria-label": `Story of restart ${one.number}`, onclick: () => open({story: one.number}),
    }), logs(one), stacks(one))],
  ];
  const isLast = doc.restarts.at(-1).outcome === "failed" ? " The newest row is the failure that ended the run." : "";
  const held = doc.goodput?.slot_seconds;
  const cost = !held ? "" : ` In slot-seconds: ${number(held.recomputed)} done again, ${number(held.detection)} until they were noticed.`;
  const lines = [
    make("p", {text: `${sum}. ${count(totals.lost_steps, "step")} done again, ${seconds(totals.took_s)} without a step.${cost}${isLast}`}),
    legend(doc.restarts),
    table("Restarts, the newest first", columns, shown),
  ];
  const box = make("div", {}, ...lines);
  if (newest.length > shown.length) {
    box.append(make("button", {
      type: "button", "data-key": "all", text: `Show all ${newest.length}`,
      onclick: () => { showsAll = true; box.replaceChildren(...[drawRestarts(doc, open)].flat()); },
    }));
  }
  if (doc.num_restarts > newest.length) {
    box.append(make("p", {class: "quiet", text: `${doc.num_restarts - newest.length} older ones: elastic explain`}));
  }
  return box;
}
