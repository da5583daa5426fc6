// Charts by uPlot: loss, tokens per second and world size, re-forms marked on each.

import {make, moment} from "./dom.js";

const HEIGHT = 190;
// Of more re-forms only the signs at the top are drawn, or the lines would hide the curve.
const MOST_LINES = 40;
const light = matchMedia("(prefers-color-scheme: light)");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {ink: of("--ink"), grid: of("--grid"), line: of("--blue"), bad: of("--vermillion"), plan: of("--green")};
}

// A dashed line with a triangle for a failure, a dotted one with a square for what was planned.
function marking(marks, place) {
  return (plot) => {
    const {ctx, bbox} = plot;
    const paint = colours();
    ctx.save();
    const told = marks();
    for (const mark of told) {
      const at = place(mark);
      if (at === null || at === undefined) continue;
      const x = Math.round(plot.valToPos(at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = mark.is_failure ? paint.bad : paint.plan;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash((mark.is_failure ? [5, 3] : [1, 3]).map((one) => one * devicePixelRatio));
      if (told.length <= MOST_LINES) {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      const half = 4 * devicePixelRatio;
      ctx.beginPath();
      if (mark.is_failure) {
        ctx.moveTo(x - half, bbox.top);
        ctx.lineTo(x + half, bbox.top);
        ctx.lineTo(x, bbox.top + 2 * half);
        ctx.fill();
      } else ctx.fillRect(x - half, bbox.top, 2 * half, 2 * half);
    }
    ctx.restore();
  };
}

// Day and time in two lines, as everywhere on the page in UTC.
function clock(timeS) {
  return `${moment(timeS).slice(11)}\n${moment(timeS).slice(5, 10)}`;
}

// One chart: `data()` gives [xs, ys], `marks()` the re-forms, `place(mark)` where on the x axis.
export class Chart {
  constructor({title, label, isTime = false, isStepped = false, digits, marks, place}) {
    this.box = make("div", {class: "plot"});
    this.note = make("p", {class: "quiet", text: "Nothing told yet."});
    this.figure = make("figure", {class: "chart"},
      make("figcaption", {text: title}), this.note, this.box);
    this.facts = {label, isTime, isStepped, digits, marks, place};
    this.plot = null;
    this.data = [[], []];
    new ResizeObserver(() => this.fit()).observe(this.box);
    light.addEventListener("change", () => this.anew());
  }

  show(xs, ys) {
    this.data = [xs, ys];
    const is = xs.length > 0 && ys.some((one) => one !== null);
    this.note.hidden = is;
    this.box.hidden = !is;
    if (!is) return;
    if (this.plot === null) this.anew();
    else this.plot.setData(this.data);
  }

  fit() {
    const width = this.box.clientWidth;
    if (this.plot !== null && width > 0 && width !== this.plot.width) {
      this.plot.setSize({width, height: HEIGHT});
    }
  }

  anew() {
    if (!this.data[0].length) return;
    this.plot?.destroy();
    const {label, isTime, isStepped, digits, marks, place} = this.facts;
    const {ink, grid, line} = colours();
    const axis = {stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1}, font: "12px system-ui"};
    const value = (_, one) => one === null || one === undefined ? "–" : one.toLocaleString("en", {maximumFractionDigits: digits});
    const xValue = (_, one) => one === null || one === undefined ? "–" : isTime ? `${moment(one)} UTC` : String(one);
    this.plot = new uPlot({
      width: this.box.clientWidth || 300,
      height: HEIGHT,
      tzDate: (timeS) => uPlot.tzDate(new Date(timeS * 1e3), "Etc/UTC"),
      scales: {x: {time: isTime}, y: isStepped ? {range: (_, low, high) => [0, Math.max(1, high) * 1.15]} : {}},
      series: [
        {label: isTime ? "time" : "step", value: xValue},
        {
          label, value, stroke: line, width: 2, spanGaps: true, points: {show: this.data[0].length < 2},
          paths: isStepped ? uPlot.paths.stepped({align: 1}) : undefined,
        },
      ],
      axes: [{...axis, space: isTime ? 110 : 60, ...(isTime ? {values: (_, all) => all.map(clock)} : {})}, {...axis, size: 62}],
      hooks: {draw: [marking(marks, place)]},
      legend: {live: true},
    }, this.data, this.box);
  }
}
