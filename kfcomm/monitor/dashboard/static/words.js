// Numbers in words, and elements: text is always text, never markup.

export function size(nbytes) {
  if (nbytes == null) return "";
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (nbytes < 1000) return unit === "B" || nbytes >= 99.95 ? `${nbytes.toFixed(0)} ${unit}` : `${nbytes.toFixed(1)} ${unit}`;
    nbytes /= 1000;
  }
  return `${nbytes.toFixed(1)} TB`;
}

export function span(seconds) {
  if (seconds == null) return "";
  for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
    const value = seconds * factor;
    if (value >= 1) return value >= 99.95 ? `${value.toFixed(0)} ${unit}` : `${value.toFixed(1)} ${unit}`;
  }
  return seconds > 0 ? "<1 µs" : "0";
}

export const rate = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function ranks(list) {
  const runs = [];
  for (const rank of [...list].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && rank === last[1] + 1) last[1] = rank; else runs.push([rank, rank]);
  }
  const text = runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
  return `rank${list.length === 1 ? "" : "s"} ${text}`;
}

export function element(tag, { text, kind, ...attributes } = {}, ...children) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text != null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export function drawn(tag, { text, ...attributes } = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  if (text != null) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
