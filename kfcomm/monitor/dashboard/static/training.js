// Figures of training over time, one small chart for each, with the events as marks.
import uPlot from "./vendor/uPlot.esm.js";
import { clock, color, element, rate } from "./words.js";

const box = document.getElementById("training"), card = document.getElementById("training-card");
const mark = document.getElementById("mark");
const FIRST = ["loss", "noise_scale", "batch_size", "batch", "learning_rate", "size"];
const TITLES = { size: "world size", batch_size: "batch", learning_rate: "learning rate", noise_scale: "noise scale" };
const MAX_CHARTS = 16, MAX_POINTS = 4000;
let times = [], series = new Map(), charts = new Map(), events = [], drawn = 0;

export function showPast(points) {
  times = [];
  series = new Map();
  for (const [time, worldSize, gauges] of points) add(time, worldSize, gauges);
  draw(true);
}

export function showTraining(figures) {
  if (figures.ended || (times.length && figures.time - times[times.length - 1] < 0.9)) return;
  add(figures.time, figures.size, figures.gauges);
  draw(false);
}

export function showMarks(given) {
  events = given;
  draw(true);
}

export function restyle() {
  for (const chart of charts.values()) chart.destroy();
  charts = new Map();
  box.replaceChildren();
  draw(true);
}

function add(time, worldSize, gauges) {
  const all = { ...gauges, size: worldSize };
  for (const name of Object.keys(all)) if (!series.has(name)) series.set(name, Array(times.length).fill(null));
  times.push(time);
  for (const [name, values] of series) values.push(all[name] ?? null);
  if (times.length > MAX_POINTS) {
    times = times.filter((_, i) => i % 2 === 0);
    for (const [name, values] of series) series.set(name, values.filter((_, i) => i % 2 === 0));
  }
}

function draw(now) {
  const has = series.size > 1;
  if (card.hidden === has) card.hidden = !has;
  if (!has || times.length < 2 || (!now && performance.now() - drawn < 900)) return;
  drawn = performance.now();
  const place = (name) => (FIRST.indexOf(name) + 1 || 99);
  const shown = [...series.keys()].sort((a, b) => place(a) - place(b)).slice(0, MAX_CHARTS);
  for (const name of shown) {
    const data = [times, series.get(name)];
    if (charts.has(name)) charts.get(name).setData(data);
    else charts.set(name, chart(name, data));
  }
}

function chart(name, data) {
  const holder = element("div", { kind: "chart" });
  box.append(holder);
  const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line") }, font: "11px system-ui" };
  return new uPlot({
    width: holder.clientWidth || 330, height: 150, title: TITLES[name] || name, legend: { show: false },
    cursor: { points: { size: 7 } },
    scales: { x: { time: true } },
    axes: [{ ...axis, space: 70, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 58, values: (_, ticks) => ticks.map((v) => (Math.abs(v) >= 1e5 ? v.toExponential(0) : String(+v.toPrecision(4)))) }],
    series: [{}, { stroke: color("flow"), width: 1.6, spanGaps: true, paths: name === "size" ? uPlot.paths.stepped({ align: 1 }) : undefined }],
    hooks: {
      drawClear: [(plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        for (const event of events) {
          const x = plot.valToPos(event.time, "x", true);
          if (x >= bbox.left && x <= bbox.left + bbox.width) {
            ctx.strokeStyle = color(event.bad ? "alarm" : "warn");
            ctx.setLineDash([4, 3]);
            ctx.beginPath();
            ctx.moveTo(x, bbox.top);
            ctx.lineTo(x, bbox.top + bbox.height);
            ctx.stroke();
          }
        }
        ctx.restore();
      }],
      setCursor: [(plot) => {
        const { left, idx } = plot.cursor;
        if (idx == null || left < 0) { mark.textContent = ""; return; }
        const near = events.filter((event) => Math.abs(plot.valToPos(event.time, "x") - left) < 6);
        const value = plot.data[1][idx];
        mark.textContent = [`${clock(plot.data[0][idx])} ${name} ${value == null ? "" : +value.toPrecision(6)}`, ...near.map((event) => `${event.kind}: ${event.what}${event.why ? ` (${event.why})` : ""}`)].join("  ·  ");
      }],
    },
  }, data, holder);
}
