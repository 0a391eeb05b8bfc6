// The last seconds, a row for each rank, darker where more was moved or waited for.
import { clock, color, size, span } from "./words.js";

const canvas = document.getElementById("timeline"), title = document.getElementById("timeline-title");
const PAST_S = 30, LEFT = 34, BOTTOM = 16;
let looks = [], field = "sent", events = [];

document.getElementById("timeline-choice").onclick = ({ target }) => {
  if (!target.dataset.field) return;
  field = target.dataset.field;
  for (const button of target.parentNode.children) button.classList.toggle("on", button === target);
  drawTimeline();
};

export function pastTimeline(rates) {
  looks = rates.map(([time, ranks, sent, received, waited]) => ({ time, waited, sent: byRank(ranks, sent), received: byRank(ranks, received) }));
}

export function addTimeline(figures) {
  if (figures.ended || (looks.length && figures.time <= looks[looks.length - 1].time)) return;
  const answering = figures.ranks.filter((one) => one.answers), ranks = answering.map((one) => one.rank);
  looks.push({ time: figures.time, waited: figures.waited, sent: byRank(ranks, answering.map((one) => one.sent)), received: byRank(ranks, answering.map((one) => one.received)) });
  while (looks.length && looks[0].time < figures.time - PAST_S) looks.shift();
}

export function markTimeline(given) { events = given; }

const byRank = (ranks, values) => Object.fromEntries(ranks.map((rank, i) => [rank, values[i]]));

export function drawTimeline() {
  if (!looks.length) return;
  const ranks = [...new Set(looks.flatMap((look) => Object.keys(look.sent)))].map(Number).sort((a, b) => a - b);
  const rows = Math.max(1, ranks.length), height = Math.max(90, Math.min(300, rows * 18)) + BOTTOM;
  const width = canvas.clientWidth, scale = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d"), end = looks[looks.length - 1].time;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const x = (time) => LEFT + ((time - end + PAST_S) / PAST_S) * (width - LEFT), each = (height - BOTTOM) / rows;
  let most = 0;
  for (const look of looks) for (const value of Object.values(look[field])) most = Math.max(most, value);
  context.fillStyle = color(field === "waited" ? "warn" : "flow");
  looks.forEach((look, i) => {
    const from = Math.max(LEFT, x(i ? looks[i - 1].time : look.time - 0.2)), to = x(look.time);
    ranks.forEach((rank, row) => {
      const value = look[field][rank];
      if (value) {
        context.globalAlpha = 0.08 + 0.92 * (value / most);
        context.fillRect(from, row * each, Math.max(0.5, to - from), Math.max(1, each - 1));
      }
    });
  });
  context.globalAlpha = 1;
  context.fillStyle = color("faint");
  context.font = "11px system-ui";
  context.textBaseline = "middle";
  const skip = Math.ceil(11 / each);
  ranks.forEach((rank, row) => { if (row % skip === 0) context.fillText(rank, 6, (row + 0.5) * each); });
  for (let ago = 0; ago <= PAST_S; ago += 5) {
    context.textAlign = ago === 0 ? "right" : ago === PAST_S ? "left" : "center";
    context.fillText(ago ? `−${ago} s` : clock(end), x(end - ago), height - 6);
  }
  context.textAlign = "left";
  for (const event of events) {
    if (event.time > end - PAST_S && event.time <= end + 1) {
      context.fillStyle = color(event.bad ? "alarm" : "warn");
      context.fillRect(Math.min(width - 2, x(event.time)), 0, 2, height - BOTTOM);
    }
  }
  title.textContent = `darkest: ${field === "waited" ? `${span(most)} each second` : `${size(most)}/s`}`;
}
