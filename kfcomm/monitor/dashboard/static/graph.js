// Graph of ranks and hosts: the strategy's edges, the traffic of each direction, and waits.
import { drawn, size } from "./words.js";

const svg = document.getElementById("graph");
const WIDTH = 900, HEIGHT = 380;
const MAX_LABELS = 40;
let places = [], radius = 16, laidOut = "", rule = null, graphs = null;

svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
const arrow = drawn("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
  drawn("path", { class: "head-wait", d: "M0 0.6 L8 4 L0 7.4 z" }));
svg.append(drawn("defs", {}, arrow));
const layers = Object.fromEntries(["hosts", "edges", "flows", "waits", "ranks", "labels"].map((name) => {
  const layer = drawn("g", { id: `graph-${name}` });
  svg.append(layer);
  return [name, layer];
}));

export function showGraphs(given, redraw) {
  graphs = given;
  rule = graphs.rules.length - 1;
  laidOut = "";
  const box = document.getElementById("rules");
  box.replaceChildren();
  if (graphs.rules.length > 1) {
    graphs.rules.forEach((one, number) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = `${one.up_to == null ? "larger" : `≤ ${size(one.up_to)}`}: ${one.name}`;
      button.onclick = () => { rule = number; laidOut = ""; redraw(); };
      box.append(button);
    });
  }
}

// Evenly along an ellipse: equal angles would crowd its ends.
function around(count, cx, cy, rx, ry, put) {
  if (count === 1) { put(0, [cx, cy]); return; }
  const STEPS = 720, points = [], lengths = [0];
  for (let i = 0; i <= STEPS; i++) {
    const angle = (2 * Math.PI * i) / STEPS - Math.PI / 2;
    points.push([cx + rx * Math.cos(angle), cy + ry * Math.sin(angle)]);
    if (i) lengths.push(lengths[i - 1] + Math.hypot(points[i][0] - points[i - 1][0], points[i][1] - points[i - 1][1]));
  }
  for (let i = 0, at = 0; i < count; i++) {
    while (lengths[at] < (lengths[STEPS] * i) / count) at++;
    put(i, points[at]);
  }
}

function layOut(count) {
  const hosts = graphs && graphs.hosts.length === count ? graphs.hosts : Array(count).fill(0);
  const byHost = new Map();
  hosts.forEach((host, rank) => byHost.set(host, [...(byHost.get(host) || []), rank]));
  places = [];
  layers.hosts.replaceChildren();
  if (byHost.size === 1) {
    radius = count > 40 ? 11 : count > 20 ? 13 : 17;
    const ry = HEIGHT / 2 - radius - 12;
    around(count, WIDTH / 2, HEIGHT / 2, WIDTH / 2 - (count > 12 ? 40 : 110), ry, (i, at) => { places[i] = at; });
    return;
  }
  const columns = Math.ceil(Math.sqrt(byHost.size * 1.8)), rows = Math.ceil(byHost.size / columns);
  const width = WIDTH / columns, height = HEIGHT / rows;
  const most = Math.max(...[...byHost.values()].map((list) => list.length));
  radius = Math.max(6, Math.min(16, Math.min(width, height) / (most > 8 ? 11 : 8)));
  [...byHost].forEach(([host, list], number) => {
    const x = (number % columns) * width, y = Math.floor(number / columns) * height;
    layers.hosts.append(drawn("rect", { class: "host", x: x + 6, y: y + 6, width: width - 12, height: height - 12, rx: 12 }));
    layers.hosts.append(drawn("text", { x: x + 40, y: y + 20, class: "label", text: `host ${host}` }));
    around(list.length, x + width / 2, y + height / 2 + 5, width / 2 - 26 - radius, height / 2 - 24 - radius, (i, at) => { places[list[i]] = at; });
  });
}

function curve([a, b], bend = 0.12) {
  const [x0, y0] = places[a], [x1, y1] = places[b];
  const length = Math.hypot(x1 - x0, y1 - y0) || 1, ux = (x1 - x0) / length, uy = (y1 - y0) / length;
  const off = Math.min(26, bend * length);
  const mx = (x0 + x1) / 2 - uy * off, my = (y0 + y1) / 2 + ux * off;
  const sx = x0 + ux * radius, sy = y0 + uy * radius, ex = x1 - ux * (radius + 3), ey = y1 - uy * (radius + 3);
  return { d: `M${sx.toFixed(1)} ${sy.toFixed(1)}Q${mx.toFixed(1)} ${my.toFixed(1)} ${ex.toFixed(1)} ${ey.toFixed(1)}`, at: [(x0 + x1) / 2 - uy * off * 0.75, (y0 + y1) / 2 + ux * off * 0.75] };
}

function redrawFixed(count) {
  layOut(count);
  layers.edges.replaceChildren();
  const one = graphs && graphs.rules[rule];
  if (one && graphs.hosts.length === count) {
    const seen = new Set();
    for (const edge of [...one.up, ...one.down]) {
      const key = edge.join();
      if (!seen.has(key)) layers.edges.append(drawn("path", { class: "edge", d: curve(edge).d }));
      seen.add(key);
    }
    layers.edges.setAttribute("stroke-opacity", seen.size > 150 ? Math.max(0.15, 60 / seen.size) : 1);
  }
  document.querySelectorAll("#rules button").forEach((button, number) => button.classList.toggle("on", number === rule));
}

// The same elements are used again, which keeps many updates a second cheap.
function reuse(layer, count, make) {
  while (layer.childElementCount > count) layer.lastChild.remove();
  while (layer.childElementCount < count) layer.append(make());
  return [...layer.children];
}

export function drawGraph(figures, waits) {
  const count = Math.max(figures.size, 1);
  const key = `${count} ${figures.epoch} ${rule} ${graphs ? graphs.strategy : ""}`;
  if (key !== laidOut) { laidOut = key; redrawFixed(count); }

  const sums = new Map();
  for (const [source, target, kind, rate] of figures.links) {
    if (places[source] && places[target]) {
      const id = `${source},${target}`;
      const known = sums.get(id) || { edge: [source, target], kind, rate: 0 };
      known.rate += rate;
      sums.set(id, known);
    }
  }
  const flows = figures.ended ? [] : [...sums.values()];
  const most = Math.max(1, ...flows.map((one) => one.rate));
  const wide = count > 20 ? 4 : 7;
  reuse(layers.flows, flows.length, () => drawn("path", { class: "flow" }, drawn("title"))).forEach((path, i) => {
    const one = flows[i], share = one.rate / most;
    path.setAttribute("d", curve(one.edge).d);
    path.setAttribute("stroke-width", (0.6 + wide * share).toFixed(2));
    path.setAttribute("stroke-opacity", (0.15 + 0.75 * share).toFixed(2));
    path.firstChild.textContent = `rank ${one.edge[0]} → rank ${one.edge[1]} over ${one.kind}: ${size(one.rate)}/s`;
  });
  const large = flows.filter((one) => one.rate > 0.02 * most);
  const labelled = large.length <= MAX_LABELS && count <= 20 ? large : large.sort((a, b) => b.rate - a.rate).slice(0, 6);
  reuse(layers.labels, labelled.length, () => drawn("text", { class: "label" })).forEach((text, i) => {
    const { at } = curve(labelled[i].edge);
    text.setAttribute("x", at[0].toFixed(1));
    text.setAttribute("y", at[1].toFixed(1));
    text.textContent = `${size(labelled[i].rate)}/s`;
  });

  const pairs = new Map();
  for (const wait of waits.waits) {
    for (const { rank } of wait.waiting) for (const { rank: missing } of wait.missing) pairs.set(`${rank},${missing}`, [rank, missing]);
  }
  const waiting = [...pairs.values()].filter(([a, b]) => places[a] && places[b]).slice(0, 200);
  reuse(layers.waits, waiting.length, () => drawn("path", { class: "waiting", "marker-end": "url(#arrow)" })).forEach((path, i) => path.setAttribute("d", curve(waiting[i], -0.16).d));

  const known = new Map(figures.ranks.map((one) => [one.rank, one]));
  const slow = slowest(figures);
  reuse(layers.ranks, count, () => drawn("g", {}, drawn("circle"), drawn("text"), drawn("title"))).forEach((group, rank) => {
    const [circle, text, title] = group.children, [x, y] = places[rank], one = known.get(rank);
    const gone = figures.gone.includes(rank) || (figures.ended && !one);
    const kind = gone ? "gone" : !one ? "elsewhere" : !one.answers ? "silent" : rank === slow ? "slow" : "";
    group.setAttribute("class", `rank ${kind}`);
    circle.setAttribute("cx", x); circle.setAttribute("cy", y); circle.setAttribute("r", radius);
    text.setAttribute("x", x); text.setAttribute("y", y);
    text.setAttribute("class", gone ? "cross" : "");
    text.textContent = gone ? "✕" : rank;
    title.textContent = `rank ${rank}${gone ? ": gone" : !one ? ": cannot be asked" : !one.answers ? ": no answer" : rank === slow ? ": waited for most" : ""}`;
  });
}

export function slowest(figures) {
  const list = Object.entries(figures.waited).filter(([, seconds]) => seconds > 0);
  const total = list.reduce((sum, [, seconds]) => sum + seconds, 0);
  const top = list.reduce((best, one) => (best && best[1] >= one[1] ? best : one), null);
  return top && total > 0.05 && top[1] / total > 1.5 / Math.max(2, figures.size) ? Number(top[0]) : null;
}
