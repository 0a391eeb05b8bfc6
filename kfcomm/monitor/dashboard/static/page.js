// The page: hears the server's messages, and redraws what they change.
import { drawGraph, showGraphs, slowest } from "./graph.js";
import { showNames } from "./names.js";
import { addTimeline, drawTimeline, markTimeline, pastTimeline } from "./timeline.js";
import { restyle, showMarks, showPast, showTraining } from "./training.js";
import { clock, element, ranks as inWords, rate, size, span } from "./words.js";

const MAX_FINDINGS = 2;
const BAD = new Set(["lost", "gone", "strategy refused", "end"]);
const byId = (id) => document.getElementById(id);
let figures = null, waits = { waits: [], findings: [] }, names = null, events = [], isDue = false, isLost = false, smooth = {};

// ---------------------------------------------------------------- theme

const THEMES = ["auto", "dark", "light"];
const system = matchMedia("(prefers-color-scheme: dark)");
let theme = THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "auto";
function applyTheme() {
  document.documentElement.classList.toggle("dark", theme === "dark" || (theme === "auto" && system.matches));
  byId("theme").textContent = `theme: ${theme}`;
  restyle();
  drawTimeline();
}
byId("theme").onclick = () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem("theme", theme);
  applyTheme();
};
system.onchange = applyTheme;
applyTheme();

// ---------------------------------------------------------------- messages

let source = null;
function connect() {
  source = new EventSource("events");
  const on = (kind, take) => source.addEventListener(kind, (message) => { isLost = false; take(JSON.parse(message.data)); plan(); });
  on("past", (given) => { pastTimeline(given.rates); showPast(given.training); });
  on("figures", (given) => { given.strategy ||= figures ? figures.strategy : ""; figures = given; average(); addTimeline(figures); showTraining(figures); });
  on("graphs", (given) => { showGraphs(given, plan); });
  on("names", (given) => { names = given; showNames(given); });
  on("waits", (given) => { waits = given; showWaits(); });
  on("events", (given) => {
    events = given.events.map((one) => ({ ...one, bad: BAD.has(one.kind) }));
    showEvents();
    showMarks(events);
    markTimeline(events);
  });
  source.onopen = () => { isLost = false; plan(); };
  source.onerror = () => {
    isLost = true;
    plan();
    // A server that was there and refuses now may come back.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 1500);
    else if (figures && figures.ended) source.close();
  };
}
connect();

function plan() {
  if (!isDue) {
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  }
}

// Waiting of the last looks: one look of 0.2 s jumps too much for a table.
function average() {
  const next = {};
  for (const [rank, seconds] of Object.entries(figures.waited)) next[rank] = rank in smooth ? smooth[rank] + 0.2 * (seconds - smooth[rank]) : seconds;
  smooth = next;
  figures.waited = smooth;
}

// ---------------------------------------------------------------- drawing

function draw() {
  drawState();
  if (!figures) return;
  byId("job").textContent = figures.job;
  if (figures.program) byId("program").textContent = figures.program;
  document.title = `${figures.job} · kfcomm`;
  byId("graph-title").textContent = figures.strategy;
  drawAlarms();
  drawTiles();
  drawGraph(figures, waits);
  drawStragglers();
  drawRanks();
  drawTimeline();
}

function drawState() {
  const state = byId("state");
  const ended = figures && figures.ended;
  const [words, kind] = ended ? ["ended", "bad"] : isLost ? ["connection lost", "bad"] : !figures ? ["connecting", ""]
    : figures.gone.length ? [`${figures.gone.length} gone`, "bad"] : waits.findings.length ? ["waits", "bad"] : ["runs", "good"];
  state.textContent = words;
  state.className = `badge ${kind}`;
}

function drawAlarms() {
  const lines = [];
  const silent = figures.ranks.filter((one) => !one.answers).map((one) => one.rank);
  const end = events.findLast((one) => one.kind === "end");
  if (figures.ended) lines.push(`the job has ended${end ? `: ${end.what}` : ""}`);
  const reasons = events.filter((one) => one.kind === "lost" && figures.gone.some((rank) => one.what === `rank ${rank}`)).map((one) => one.why);
  if (figures.note) lines.push(figures.note);
  if (figures.gone.length) lines.push([`gone: ${inWords(figures.gone)}`, ...new Set(reasons)].slice(0, 4).join("; "));
  if (silent.length && !figures.ended) lines.push(`no answer: ${inWords(silent)} (stopped${figures.note ? ", or another version" : "?"})`);
  if (isLost && !figures.ended) lines.push("the server of this page does not answer: it has ended, or its host is out of reach; trying again");
  const box = byId("alarms");
  if ([...box.children].map((one) => one.textContent).join("\n") !== lines.join("\n")) box.replaceChildren(...lines.map((text) => element("div", { text })));
}

function drawTiles() {
  const here = figures.ranks.filter((one) => one.answers);
  const sum = (field) => here.reduce((total, one) => total + (one[field] || 0), 0);
  const most = (field) => Math.max(0, ...here.map((one) => one[field] || 0));
  const slow = slowest(figures), elsewhere = figures.size - figures.ranks.length - figures.gone.length;
  const calls = names && !names.is_first ? rate(Math.max(0, ...Object.values(names.calls))) : "–";
  const tiles = [
    [`${figures.ranks.length} of ${figures.size}`, elsewhere > 0 ? `ranks, ${elsewhere} cannot be asked` : "ranks"],
    [figures.strategy || "?", figures.epoch ? `strategy, epoch ${figures.epoch}` : "strategy"],
    [calls, "collectives/s"],
    [size(sum("sent")), "sent/s"],
    [slow == null ? "–" : `rank ${slow}`, "slowest"],
    [rate(sum("in_flight")), "calls in flight"],
    [span(most("longest")), "longest wait"],
    [span(most("lag")), "loop lag"],
    [size(sum("rss")), "memory"],
    [rate(sum("fds")), "descriptors"],
  ];
  const box = byId("tiles");
  while (box.childElementCount < tiles.length) box.append(element("div", { kind: "tile" }, element("b"), element("span")));
  tiles.forEach(([value, words], i) => {
    const [b, text] = box.children[i].children;
    b.textContent = value;
    b.title = value;
    text.textContent = words;
  });
}

function drawStragglers() {
  const list = Object.entries(figures.waited).map(([rank, seconds]) => [Number(rank), seconds]).sort((a, b) => b[1] - a[1]);
  const most = Math.max(1e-9, ...list.map(([, seconds]) => seconds)), slow = slowest(figures), box = byId("stragglers");
  if (!list.length) { box.replaceChildren(element("p", { kind: "calm", text: "no rank was waited for" })); return; }
  while (box.children.length > list.length || box.firstElementChild?.tagName === "P") box.lastElementChild.remove();
  while (box.children.length < list.length) box.append(element("div", { kind: "bar" }, element("span"), element("div", {}, element("i")), element("span")));
  list.forEach(([rank, seconds], i) => {
    const row = box.children[i], [name, bar, value] = row.children;
    row.classList.toggle("slow", rank === slow);
    name.textContent = `rank ${rank}`;
    bar.firstChild.style.width = `${(100 * seconds) / most}%`;
    value.textContent = span(seconds);
  });
}

const RANKS = [
  ["rank", (one) => one.rank], ["pid", (one) => one.pid || ""], ["calls/s", (one) => (names && !names.is_first && names.calls[one.rank] != null ? rate(names.calls[one.rank]) : "–")],
  ["sent/s", (one) => size(one.sent)], ["received/s", (one) => size(one.received)],
  ["waits for", (one) => (!one.answers ? "no answer" : one.waits_for == null ? "" : `rank ${one.waits_for} (${rate(100 * one.share)} %)`)],
  ["in flight", (one) => one.in_flight ?? ""], ["longest", (one) => span(one.longest)], ["loop lag", (one) => span(one.lag)],
  ["memory", (one) => size(one.rss)], ["peak", (one) => size(one.peak)], ["shared", (one) => size(one.shared)], ["descriptors", (one) => one.fds ?? ""],
];

function drawRanks() {
  const head = document.querySelector("#ranks thead"), body = document.querySelector("#ranks tbody");
  if (!head.childElementCount) head.append(element("tr", {}, ...RANKS.map(([text]) => element("th", { text }))));
  const gone = figures.gone.map((rank) => ({ rank, isGone: true }));
  const list = [...figures.ranks, ...gone].sort((a, b) => a.rank - b.rank);
  while (body.rows.length > list.length) body.lastElementChild.remove();
  while (body.rows.length < list.length) body.append(element("tr", {}, ...RANKS.map(() => element("td"))));
  list.forEach((one, i) => {
    const row = body.rows[i];
    row.className = one.isGone || !one.answers ? "bad" : "";
    RANKS.forEach(([title, shown], column) => {
      const text = String(one.isGone ? (title === "rank" ? one.rank : title === "waits for" ? "gone" : "") : shown(one));
      if (row.cells[column].textContent !== text) row.cells[column].textContent = text;
    });
  });
}

function showWaits() {
  const box = byId("waits");
  byId("waits-title").textContent = waits.waits.length ? "now" : "";
  if (!waits.waits.length) {
    box.replaceChildren(element("p", { kind: "calm", text: "No call has waited for more than a second." }));
    return;
  }
  const places = (list) => list.map((text) => element("div", { kind: "at", text }));
  const found = waits.findings.slice(0, MAX_FINDINGS).map((one) => element("div", { kind: `finding ${one.kind === "under way" ? "" : "bad"}`, text: one.text }));
  if (waits.findings.length > MAX_FINDINGS) found.push(element("div", { kind: "calm", text: `and ${waits.findings.length - MAX_FINDINGS} more findings` }));
  const calls = waits.waits.map((wait) => {
    const lines = [element("div", {}, element("b", { text: wait.title }), ` for ${wait.waited} s`)];
    if (wait.waiting.length) {
      lines.push(element("div", { text: `waiting: ${inWords(wait.waiting.map((one) => one.rank))}` }), ...places([...new Set(wait.waiting.flatMap((one) => one.at))].slice(0, 2)));
    }
    for (const one of wait.missing.slice(0, 8)) lines.push(element("div", { text: `missing: rank ${one.rank}, last ${one.did}` }), ...places(one.at));
    if (wait.missing.length > 8) lines.push(element("div", { text: `missing: ${wait.missing.length - 8} more` }));
    if (wait.unknown.length) lines.push(element("div", { text: `no dump: ${inWords(wait.unknown)}` }));
    for (const [rank, how] of Object.entries(wait.finished).slice(0, 4)) lines.push(element("div", { text: `over on rank ${rank}: ${how}` }));
    return element("div", { kind: "wait" }, ...lines);
  });
  if (waits.more) calls.push(element("div", { kind: "calm", text: `and ${waits.more} more` }));
  box.replaceChildren(...found, ...calls);
}

function showEvents() {
  byId("events-title").textContent = events.length ? `${events.length}` : "";
  const rows = [...events].reverse().slice(0, 150).map((one) => element("li", { kind: one.bad ? "bad" : "" },
    element("span", { kind: "faint", text: clock(one.time) }), element("span", { kind: "kind", text: one.kind }), one.what,
    ...(one.why ? [element("div", { kind: "faint", text: one.why })] : [])));
  byId("events").replaceChildren(...(rows.length ? rows : [element("li", { kind: "calm", text: "no loss, join, swap or decision yet" })]));
}

showWaits();
showEvents();
addEventListener("resize", () => { restyle(); plan(); });
