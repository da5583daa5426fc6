// One run: its parts, each drawn anew only when what it shows has changed.

import {ago, count, hasEnded, make, number, percent, state, whole} from "./dom.js";
import {Chart} from "./charts.js";
import {Evidence} from "./evidence.js";
import {drawLanes} from "./lanes.js";
import {drawRestarts} from "./restarts.js";
import {drawEvents, drawGoodput, drawSaves, drawTries} from "./tables.js";

// A part: a title, and what draws it from the document. `of` is what it depends on.
function part(title, id, of, drawn) {
  const place = make("div");
  const box = make("section", {id, "aria-labelledby": `${id}-title`},
    make("h2", {id: `${id}-title`, text: title}), place);
  let before = null;
  const draw = (told) => {
    const now = JSON.stringify(of(told));
    if (now === before) return;
    before = now;
    const focus = document.activeElement;
    const key = place.contains(focus) ? focus.dataset.key : null;
    place.replaceChildren(...[drawn(told)].flat());
    if (key) [...place.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key)?.focus();
  };
  return {box, draw};
}

function fact(name, value, more = null) {
  return make("div", {class: "fact"},
    make("dt", {text: name}),
    make("dd", {}, value instanceof Node ? value : String(value), more && make("small", {}, more)));
}

// Of a run that keeps them; those of one that is over have gone with it.
function drawSnapshots({snapshots, state: stands}) {
  if (!snapshots) return [];
  const value = snapshots.step === null ? "none kept" : `step ${whole(snapshots.step)}`;
  const when = snapshots.problem ? `the last failed: ${snapshots.problem}` : ago(snapshots.kept_s);
  const skipped = snapshots.skipped ? `, ${whole(snapshots.skipped)} skipped` : "";
  return [fact("Snapshot", value, make("span", {}, hasEnded(stands) ? "gone with the run" : when, skipped))];
}

function drawState(told) {
  const {status} = told;
  const head = make("p", {class: "headline"}, state(status.state),
    make("span", {class: "reason", text: status.reason || (status.phase && `now: ${status.phase}`) || ""}));
  const causes = Object.entries(status.restarts_by_cause).map(([cause, num]) => `${cause} ${num}`).join(", ");
  const facts = make("dl", {class: "facts"},
    fact("Step", whole(status.step), status.until === null ? null : `of ${whole(status.until)}`),
    fact("Loss", number(status.loss, 4), status.tokens_per_s === null ? null : `${whole(Math.round(status.tokens_per_s))} tokens/s`),
    fact("Workers", whole(status.world_size), status.generation === null ? null : `generation ${status.generation}`),
    fact("Restarts", whole(status.restarts), causes || null),
    fact("Steps lost", whole(status.lost_steps), "done again"),
    fact("Goodput", percent(told.goodput?.share), "useful of all slot time"),
    fact("Checkpoint", status.checkpoint_step === null ? "none" : `step ${whole(status.checkpoint_step)}`, status.checkpoint_note || ago(told.checkpoint_s)),
    ...drawSnapshots(status),
    fact("Last word", ago(told.last_word_s), "of the driver"));
  const lines = [head, facts];
  if (status.last_lines) {
    lines.push(make("h3", {text: `Last lines of rank ${status.last_lines.world_rank}, generation ${status.last_lines.generation}`}),
      make("pre", {tabindex: "0", text: status.last_lines.lines.join("\n")}));
  }
  for (const node of status.kept_out) {
    lines.push(make("p", {class: "note", text: `⊘ node ${node.node_id.slice(0, 12)} (${node.node_ip || "address unknown"}) is kept out: ${node.why}`}));
  }
  if (status.archive?.failing_since_s) {
    const {missing_steps: missing, failing_since_s: sinceS, why} = status.archive;
    lines.push(make("p", {class: "note"}, `▼ the archive lags by ${count(missing.length, "checkpoint")}, since `, ago(sinceS), `: ${why}`));
  }
  const about = [];
  if (status.save_interval) about.push(make("p", {}, make("b", {text: "Saves: "}), make("span", {text: status.save_interval.why})));
  if (/^https?:\/\//.test(status.dashboard_url ?? "")) {
    about.push(make("p", {}, make("a", {href: status.dashboard_url, rel: "noreferrer", text: "Ray dashboard of this run's cluster"}),
      " (while the cluster lives)"));
  }
  about.push(make("p", {class: "quiet", text: status.storage}));
  return [...lines, ...about];
}

export function drawRun(main, api) {
  let told = null;
  const marks = () => told?.marks ?? [];
  const evidence = new Evidence(api);
  const size = new Chart({title: "Workers over time", label: "workers", isTime: true, isStepped: true, digits: 0, marks, place: (mark) => mark.time_s});
  const loss = new Chart({title: "Loss, each step as it counts", label: "loss", digits: 5, marks, place: (mark) => mark.step});
  const speed = new Chart({title: "Tokens per second", label: "tokens/s", digits: 0, marks, place: (mark) => mark.step});
  const charts = make("section", {id: "charts", "aria-label": "Charts"},
    make("p", {class: "legend"},
      make("span", {class: "key bad", text: "▼ dashed: a failure"}), " ",
      make("span", {class: "key good", text: "■ dotted: planned (growth, drain, stop)"})),
    make("div", {class: "charts"}, size.figure, loss.figure, speed.figure));
  const open = (what) => evidence.open(what);
  const parts = {
    state: part("How it stands", "state", (doc) => [doc.status, doc.goodput?.share, doc.checkpoint_s, doc.last_word_s], drawState),
    restarts: part("Restarts", "restarts", (doc) => [doc.restarts, doc.totals, doc.goodput?.slot_seconds], (doc) => drawRestarts(doc, open)),
    tries: part("Tries left", "tries", (doc) => doc.tries_left, drawTries),
    lanes: part("Nodes", "nodes", (doc) => [doc.lanes, doc.last_word_s], drawLanes),
    goodput: part("Where the time went", "goodput", (doc) => doc.goodput, drawGoodput),
    saves: part("Checkpoints", "saves", (doc) => doc.saves, drawSaves),
    events: part("Newest events", "events", (doc) => doc.events, drawEvents),
  };
  const {state: first, restarts, ...rest} = parts;
  const title = make("h1", {text: "Reading ..."});
  main.replaceChildren(title, first.box, restarts.box, charts, ...Object.values(rest).map((one) => one.box), evidence.box);
  return (doc) => {
    told = doc;
    title.textContent = doc.status.name;
    document.title = `${doc.status.state} ${doc.status.name} – elastic`;
    for (const one of Object.values(parts)) one.draw(doc);
    size.show(doc.world_size.time_s, doc.world_size.world_size);
    loss.show(doc.steps.step, doc.steps.loss);
    speed.show(doc.steps.step, doc.steps.tokens_per_s);
  };
}

