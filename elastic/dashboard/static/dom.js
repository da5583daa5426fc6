// Elements and values as text. Nothing here or elsewhere makes HTML from a string: what a run
// recorded may hold anything, and reaches the page through textContent alone.

export function make(tag, facts = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = String(value);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const DASH = "–";

export function count(value, what) {
  return `${value.toLocaleString("en")} ${what}${value === 1 ? "" : "s"}`;
}

export function whole(value) {
  return value === null || value === undefined ? DASH : value.toLocaleString("en");
}

export function number(value, digits = 1) {
  if (value === null || value === undefined) return DASH;
  return value.toLocaleString("en", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

export function percent(share) {
  return share === null || share === undefined ? DASH : `${number(100 * share, 1)} %`;
}

export function seconds(value) {
  if (value === null || value === undefined) return DASH;
  return value < 0.1 && value > 0 ? `${number(value, 3)} s` : `${number(value, 1)} s`;
}

export function age(value) {
  if (value === null || value === undefined) return DASH;
  const past = Math.max(0, value);
  if (past < 90) return `${past.toFixed(0)} s`;
  if (past < 90 * 60) return `${(past / 60).toFixed(0)} min`;
  if (past < 36 * 3600) return `${(past / 3600).toFixed(0)} h`;
  return `${(past / 86400).toFixed(0)} days`;
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return DASH;
  let amount = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (amount < 1000) return unit === "B" ? `${amount} B` : `${amount.toFixed(1)} ${unit}`;
    amount /= 1000;
  }
  return `${amount.toFixed(1)} TB`;
}

export function moment(timeS) {
  if (timeS === null || timeS === undefined) return DASH;
  const then = new Date(timeS * 1000);
  if (Number.isNaN(then.getTime())) return `${timeS} s`;
  return then.toISOString().slice(0, 19).replace("T", " ");
}

// An age that grows by itself: `tick` sets its text anew each second.
export function ago(timeS) {
  if (timeS === null || timeS === undefined) return make("span", {text: DASH});
  return make("span", {class: "ago", "data-since": timeS, title: `${moment(timeS)} UTC`, text: agoText(timeS)});
}

function agoText(timeS) {
  return `${age(Date.now() / 1000 - timeS)} ago`;
}

export function tick() {
  for (const element of document.querySelectorAll(".ago")) {
    element.textContent = agoText(Number(element.dataset.since));
  }
}

// `columns`: [title, is a number, cell of row]. Where narrow, a row becomes a block of titled lines.
export function table(caption, columns, rows) {
  const head = columns.map(([title, isNumber]) =>
    make("th", {scope: "col", class: isNumber ? "num" : null, text: title}));
  const lines = rows.map((row) => make("tr", {},
    ...columns.map(([title, isNumber, cell]) => {
      const content = cell(row);
      const box = make("td", {"data-title": title, class: isNumber ? "num" : null});
      box.append(content instanceof Node ? content : String(content ?? DASH));
      return box;
    })));
  return make("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
    make("table", {},
      make("caption", {class: "hidden", text: caption}),
      make("thead", {}, make("tr", {}, ...head)),
      make("tbody", {}, ...lines)));
}

const STATES = {
  RUNNING: ["▶", "good"], FINISHED: ["✔", "good"], STARTING: ["◔", "busy"],
  WAITING: ["⏸", "warn"], STOPPED: ["■", "calm"], FAILED: ["✖", "bad"],
  UNKNOWN: ["?", "bad"], DAMAGED: ["!", "bad"],
};

const OVER = new Set(["FINISHED", "FAILED", "STOPPED"]);

// Whether a run in the state of that name has ended.
export function hasEnded(name) {
  return OVER.has(name);
}

export function state(name) {
  const [sign, kind] = STATES[name] ?? ["?", "calm"];
  return make("strong", {class: `state ${kind}`},
    make("span", {"aria-hidden": "true", text: `${sign} `}), make("span", {text: name}));
}
