// Where does the time go? Each part's steps as bars on one clock, and their shares.
import { ask } from "./api.js";
import { empty, fill, h, seconds, svg } from "./dom.js";

const LANES = [
  { name: "Model", colour: "#15808f", what: "rollouts: the engine generates" },
  { name: "Environment", colour: "#8a7420", what: "rollouts: everything else that workflows do" },
  { name: "Evaluation", colour: "#6553a8", what: "held-out tasks" },
  { name: "Training", colour: "#c25b2a", what: "forward, backward, optimizer step" },
  { name: "Weights", colour: "#3f8c4a", what: "push of the weights to the engine" },
  { name: "Waiting", colour: "#a9b1b6", what: "the trainer has no batch yet" },
];
const MOST_BARS = 3000;

export function barsOf(curves) {
  const bars = [];
  const add = (lane, end, length, step) => { if (length > 0) bars.push({ lane, begin: end - length, end, step }); };
  const { explorer, trainer } = curves;
  explorer?.steps.forEach((step, at) => {
    const at0 = (name) => explorer.metrics[name]?.[at] ?? 0;
    const [all, waited, elsewhere] = [at0("time/explore"), at0("time/model/mean"), at0("time/environment/mean")];
    const share = waited + elsewhere > 0 ? waited / (waited + elsewhere) : 1;
    const end = explorer.times[at];
    add(0, end - all * (1 - share), all * share, step);
    add(1, end, all * (1 - share), step);
  });
  trainer?.steps.forEach((step, at) => {
    const at0 = (name) => trainer.metrics[name]?.[at] ?? 0;
    const end = trainer.times[at];
    const [push, train] = [at0("time/sync"), at0("time/train")];
    add(4, end, push, step);
    add(3, end - push, train, step);
    add(5, end - push - train, at0("time/wait"), step);
  });
  for (const part of [curves.eval, curves.bench]) part?.steps.forEach((step, at) => {
    const names = Object.keys(part.metrics).filter((name) => name.endsWith("/seconds"));
    add(2, part.times[at], Math.max(0, ...names.map((name) => part.metrics[name][at] ?? 0)), step);
  });
  return bars;
}

let zoom = null; // [from, to] in seconds since the first bar
let shownRun = "";

export async function timeline(main, state) {
  const { turn, run } = state;
  const bars = barsOf(await ask("curves", { run }));
  if (turn !== state.turn) return;
  if (shownRun !== run) { zoom = null; shownRun = run; }
  if (!bars.length) return void fill(main, empty("No times are known yet", "The first step of this run has not ended."));
  const start = bars.reduce((low, bar) => Math.min(low, bar.begin), Infinity);
  const whole = bars.reduce((high, bar) => Math.max(high, bar.end), 0) - start;
  const totals = LANES.map((lane, place) => bars.reduce((sum, bar) => sum + (bar.lane === place ? bar.end - bar.begin : 0), 0));
  const box = h("div.card.box");
  const info = h("p.quiet", { style: { "min-height": "21px" } }, "Wheel or drag to zoom; point at a bar for its step.");
  const drawn = () => draw(box, bars, start, whole, info, drawn);
  fill(main, h("div.spaced", {},
    h("div.card.box.spaced", {}, h("h2", {}, "Seconds by phase"), shares(totals, whole)),
    box));
  drawn();
}

function shares(totals, whole) {
  const explorer = totals.slice(0, 3);
  const trainer = totals.slice(3);
  const strip = (title, values, from) => h("div", {}, h("div.row", {}, h("span.quiet.grow", {}, title), h("span.quiet", {}, `${seconds(values.reduce((a, b) => a + b, 0))} of ${seconds(whole)}`)),
    h("div.share", { role: "img", "aria-label": `${title}: ${values.map((value, at) => `${LANES[from + at].name} ${seconds(value)}`).join(", ")}` }, values.map((value, at) => h("span", { style: { background: LANES[from + at].colour, width: `${(100 * value) / Math.max(whole, 1e-9)}%` }, title: `${LANES[from + at].name} ${seconds(value)}` }))));
  return [
    totals.slice(0, 3).some(Boolean) && strip("Explorer", explorer, 0), trainer.some(Boolean) && strip("Trainer", trainer, 3),
    h("div.legend", {}, LANES.map((lane, at) => totals[at] > 0 && h("span", { title: lane.what }, h("i", { style: { background: lane.colour } }), `${lane.name} `, h("b", {}, seconds(totals[at])), h("span.faint", {}, `  ${lane.what}`)))),
  ];
}

function draw(box, bars, start, whole, info, again) {
  const [from, to] = zoom ?? [0, whole];
  const lanes = LANES.map((lane, place) => ({ ...lane, place, bars: bars.filter((bar) => bar.lane === place) })).filter((lane) => lane.bars.length);
  const [width, left, high] = [Math.max(box.clientWidth - 36, 300), 92, 34];
  const height = lanes.length * high + 24;
  const x = (time) => left + ((time - from) / Math.max(to - from, 1e-9)) * (width - left - 4);
  const picture = svg("svg", { class: "lanes", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Timeline of the run's steps" });
  const ticks = width < 500 ? 3 : 6;
  for (let tick = 0; tick <= ticks; tick += 1) {
    const time = from + ((to - from) * tick) / ticks;
    picture.append(svg("line", { x1: x(time), x2: x(time), y1: 0, y2: height - 20 }));
    picture.append(svg("text", { x: x(time), y: height - 4, "text-anchor": tick === 0 ? "start" : tick === ticks ? "end" : "middle" }, seconds(time)));
  }
  lanes.forEach((lane, row) => {
    picture.append(svg("text", { x: 0, y: row * high + 21 }, lane.name));
    const seen = lane.bars.filter((bar) => bar.end - start >= from && bar.begin - start <= to);
    const stride = Math.ceil(seen.length / MOST_BARS);
    seen.forEach((bar, at) => {
      if (at % stride) return;
      const [a, b] = [Math.max(x(bar.begin - start), left), Math.min(x(bar.end - start), width - 4)];
      const rect = svg("rect", { x: a, y: row * high + 5, width: Math.max(b - a, 0.8), height: high - 12, rx: b - a > 6 ? 2 : 0, fill: lane.colour, stroke: "var(--surface)", "stroke-width": b - a > 3 ? 1 : 0 });
      rect.addEventListener("pointerenter", () => fill(info, `${lane.name}, step ${bar.step}: ${seconds(bar.end - bar.begin)}, from ${seconds(bar.begin - start)} on`));
      picture.append(rect);
    });
  });
  const timeAt = (event) => { const at = picture.getBoundingClientRect(); return from + (((event.clientX - at.left) * (width / at.width) - left) / (width - left - 4)) * (to - from); };
  picture.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = timeAt(event);
    const factor = event.deltaY > 0 ? 1.25 : 0.8;
    zoom = [Math.max(0, at - (at - from) * factor), Math.min(whole, at + (to - at) * factor)];
    if (zoom[1] - zoom[0] >= whole) zoom = null;
    again();
  }, { passive: false });
  let down = null;
  picture.addEventListener("pointerdown", (event) => { down = timeAt(event); });
  picture.addEventListener("pointerup", (event) => {
    const up = timeAt(event);
    if (down !== null && Math.abs(x(up) - x(down)) > 8) { zoom = [Math.max(0, Math.min(down, up)), Math.min(whole, Math.max(down, up))]; again(); }
    down = null;
  });
  fill(box, h("div.row", {}, h("h2.grow", {}, "Timeline"), zoom && h("button.button", { type: "button", onclick: () => { zoom = null; again(); } }, "Whole run")), info, picture);
}
