// Tables that only list: tries left, goodput, checkpoints, events.

import {DASH, make, moment, number, percent, seconds, size, table, whole} from "./dom.js";

// A budget that never granted any is not used up.
function left(one) {
  if (one.left === null) return "no limit";
  const isGone = one.left === 0 && (one.granted > 0 || one.used > 0);
  const text = one.granted === 0 ? "none granted" : `${one.left} of ${one.granted}`;
  return make("b", {class: isGone ? "bad" : null, text: `${isGone ? "▼ " : ""}${text}`});
}

export function drawTries(doc) {
  if (doc.tries_left === null) return make("p", {class: "quiet", text: "Not recorded: the run has not begun, or an older version wrote it."});
  if (!doc.tries_left.length) return make("p", {class: "quiet", text: "No budget is limited."});
  return table("Tries left", [
    ["Budget", false, (one) => one.budget],
    ["Left", true, (one) => left(one)],
    ["Used", true, (one) => one.used],
    ["Comes back", false, (one) => one.comes_back],
  ], doc.tries_left);
}

export function drawGoodput(doc) {
  const found = doc.goodput;
  if (!found || found.share === null) return make("p", {class: "quiet", text: "The run has held no slot yet, or its metrics cannot be read."});
  const buckets = Object.entries(found.slot_seconds).filter(([, held]) => held > 0);
  const share = (held) => held / found.whole_slot_seconds;
  return [
    make("p", {text: doc.goodput_text}),
    table("Where the time of the slots went", [
      ["Bucket", false, ([name]) => name.replace("reform_", "re-form: ").replaceAll("_", " ")],
      ["Slot-seconds", true, ([, held]) => number(held)],
      ["Share", true, ([, held]) => percent(share(held))],
      ["", false, ([name, held]) => {
        const bar = make("span", {class: name === "useful" ? "meter good" : "meter", "aria-hidden": "true"});
        bar.style.width = `${Math.max(1, 120 * share(held))}px`;
        return bar;
      }],
    ], [...buckets, ["in all", found.whole_slot_seconds]]),
  ];
}

const SIGNS = {
  complete: "✔", archived: "✔", pinned: "✔", quarantined: "✖", failed: "✖", gone: "✖", removed: "–", skipped: "–", incomplete: "◔",
};

export function drawSaves(doc) {
  if (!doc.saves.length) return make("p", {class: "quiet", text: "No checkpoint yet."});
  const kind = (one) => ["quarantined", "failed", "gone"].includes(one.state) ? "bad" : ["removed", "skipped"].includes(one.state) ? "quiet" : "good";
  return table("Checkpoints, the newest first", [
    ["Step", true, (one) => whole(one.step)],
    ["State", false, (one) => make("b", {class: kind(one), text: `${SIGNS[one.state] ?? "?"} ${one.state}`})],
    ["When (UTC)", false, (one) => moment(one.time_s)],
    ["Size", true, (one) => size(one.bytes)],
    ["Took", true, (one) => seconds(one.duration_s)],
    ["Stall", true, (one) => seconds(one.stall_s)],
    ["Verified", false, (one) => one.verified ? "yes, resumed from" : "not since"],
    ["Why", false, (one) => one.why || DASH],
  ], [...doc.saves].reverse());
}

export function drawEvents(doc) {
  if (!doc.events.length) return make("p", {class: "quiet", text: "Nothing has happened yet."});
  const orDash = (one) => one < 0 ? DASH : whole(one);
  return table("Events, the newest first", [
    ["Time (UTC)", false, (one) => moment(one.time_s)],
    ["Event", false, (one) => one.kind.replaceAll("_", " ")],
    ["Gen.", true, (one) => orDash(one.generation)],
    ["Step", true, (one) => orDash(one.step)],
    ["Rank", true, (one) => orDash(one.world_rank)],
    ["Reason", false, (one) => make("span", {class: "why", text: one.reason || DASH})],
  ], [...doc.events].reverse());
}
