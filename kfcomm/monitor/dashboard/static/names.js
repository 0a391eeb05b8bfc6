// Table of names: only the rows in sight are elements, so that ten thousand names stay fluid.
import { element, rate, size, span } from "./words.js";

const ROW = 24;
const COLUMNS = [
  ["name", "name", (value) => value || "(unnamed)"],
  ["rate", "calls/s", (value) => rate(value, 1)],
  ["nbytes", "bytes/s", size],
  ["p50", "p50", span],
  ["p99", "p99", span],
  ["max", "max", span],
  ["failed", "failed", (value) => rate(value)],
];
const table = document.getElementById("names");
const head = table.querySelector(".head"), body = table.querySelector(".body"), space = table.querySelector(".space");
const search = document.getElementById("search"), title = document.getElementById("names-title");
let names = { name: [] }, order = [], by = "busy", falling = true;

for (const [field, words] of COLUMNS) {
  const button = element("button", { type: "button", text: words });
  button.onclick = () => {
    falling = by === field ? !falling : field !== "name";
    by = field;
    sort();
  };
  head.append(button);
}
search.oninput = () => { body.scrollTop = 0; sort(); };
body.onscroll = draw;

export function showNames(given) {
  names = given;
  sort();
}

function sort() {
  const wanted = search.value.toLowerCase(), column = names[by] || names.name;
  order = [];
  names.name.forEach((name, i) => { if (!wanted || name.toLowerCase().includes(wanted)) order.push(i); });
  const sign = falling ? -1 : 1;
  order.sort((a, b) => (column[a] < column[b] ? -sign : column[a] > column[b] ? sign : a - b));
  title.textContent = wanted ? `${rate(order.length)} of ${rate(names.name.length)}` : rate(names.name.length);
  [...head.children].forEach((button, i) => {
    const on = COLUMNS[i][0] === by;
    button.classList.toggle("on", on);
    button.textContent = COLUMNS[i][1] + (on ? (falling ? " ↓" : " ↑") : "");
  });
  draw();
}

function draw() {
  body.style.height = `${Math.min(340, Math.max(1, order.length) * ROW)}px`;
  space.style.height = `${order.length * ROW}px`;
  const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 2), last = Math.min(order.length, first + 22);
  const rows = [...body.querySelectorAll(".row")];
  while (rows.length > last - first) rows.pop().remove();
  while (rows.length < last - first) {
    const row = element("div", { kind: "row" }, ...COLUMNS.map(() => element("span")));
    rows.push(row);
    body.append(row);
  }
  rows.forEach((row, at) => {
    const i = order[first + at];
    row.style.top = `${(first + at) * ROW}px`;
    row.className = names.failed[i] ? "row failed" : "row";
    COLUMNS.forEach(([field, , shown], column) => {
      const text = names.is_first && (field === "rate" || field === "nbytes") ? "–" : shown(names[field][i]);
      if (row.children[column].textContent !== text) row.children[column].textContent = text;
    });
    row.firstChild.title = names.name[i];
  });
}
