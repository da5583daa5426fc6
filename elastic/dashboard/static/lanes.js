// Nodes as lanes: when each held ranks of the run, and what happened on it.

import {hasEnded, make, moment} from "./dom.js";

const SIGNS = {
  death: ["✖", "bad"], "node lost": ["⊗", "bad"], error: ["!", "bad"],
  drain: ["▽", "good"], strike: ["✦", "warn"], "kept out": ["⊘", "bad"],
};

export function drawLanes(doc) {
  if (!doc.lanes.length) return make("p", {class: "quiet", text: "No node has held a rank yet."});
  const starts = doc.lanes.flatMap((lane) => [...lane.spans.map((one) => one.start_s), ...lane.marks.map((one) => one.time_s)]);
  const first = Math.min(...starts);
  const last = Math.max(doc.last_word_s, ...starts, first + 1);
  const at = (timeS) => `${(100 * (timeS - first) / (last - first)).toFixed(3)}%`;
  const isOver = hasEnded(doc.status.state);
  const lanes = doc.lanes.map((lane) => lines(lane, at, last, isOver));
  const legend = Object.entries(SIGNS).map(([what, [sign, kind]]) => make("span", {class: `key ${kind}`, text: `${sign} ${what}`}));
  return [
    make("p", {class: "legend"}, ...legend.flatMap((one) => [one, " "])),
    make("div", {class: "lanes", role: "list"}, ...lanes),
    make("p", {class: "quiet ends"}, make("span", {text: moment(first)}), make("span", {text: `${moment(last)} UTC`})),
  ];
}

function lines(lane, at, last, isOver) {
  const track = make("div", {class: "track"});
  for (const span of lane.spans) {
    const piece = make("span", {class: "span", title: `ranks ${span.ranks.join(", ")} from ${moment(span.start_s)} UTC`});
    piece.style.left = at(span.start_s);
    piece.style.right = `calc(100% - ${at(span.end_s ?? last)})`;
    track.append(piece);
  }
  for (const mark of lane.marks) {
    const [sign, kind] = SIGNS[mark.what] ?? ["?", "warn"];
    const words = `${mark.what}, ${moment(mark.time_s)} UTC: ${mark.why}`;
    const spot = make("span", {class: `mark ${kind}`, role: "img", "aria-label": words, title: words, text: sign});
    spot.style.left = at(mark.time_s);
    track.append(spot);
  }
  const counts = {};
  for (const mark of lane.marks) counts[mark.what] = (counts[mark.what] ?? 0) + 1;
  const told = Object.entries(counts).map(([what, num]) => `${what} ${num}`).join(", ");
  const isHere = !isOver && lane.spans.at(-1)?.end_s === null;
  return make("div", {class: "lane", role: "listitem"},
    make("div", {class: "node"}, make("b", {text: lane.node_ip || lane.node_id.slice(0, 12)}),
      make("small", {text: `${lane.node_id.slice(0, 12)} · ${isHere ? "in the group" : "not in the group"}${told ? ` · ${told}` : ""}`})),
    track);
}
