// Curves by uPlot (trireme/ext/page/uplot), which index.html loads.
import { h, number } from "./dom.js";

const COLOURS = ["#15808f", "#c25b2a", "#6553a8", "#3f8c4a", "#b0437c", "#8a7420", "#3a6fc4", "#7a7f86"];
export const colour = (place) => COLOURS[place % COLOURS.length];
const NEAR = 20; // pixels between the pointer and a value that is shown
const FEW = 25; // values that are shown as points, too
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(9).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// A moving mean that forgets; 0: as it was measured.
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mass = weight * mass + (1 - weight);
    mean = weight * (mean ?? 0) + (1 - weight) * value;
    return mean / mass;
  });
}

const drawn = new Set(); // uPlot listens to the window for each of them until it is destroyed
const size = (element) => ({ width: element.clientWidth, height: element.clientHeight });
const resized = new ResizeObserver((entries) => { for (const { target } of entries) target.chart.setSize(size(target)); });

function forget(element) {
  resized.unobserve(element);
  element.chart.destroy();
  drawn.delete(element);
}

const two = (n) => String(n).padStart(2, "0");
function clock(time, withSeconds) {
  const date = new Date(time * 1000);
  return [date.getHours(), date.getMinutes(), ...(withSeconds ? [date.getSeconds()] : [])].map(two).join(":");
}

// What the lines are under the pointer.
function tooltip(lines, place, show) {
  const box = h("div.tooltip", { hidden: true });
  const move = (chart) => {
    const near = lines.map((line) => ({ line, at: chart.cursor.idxs[line.series] })).filter(({ at }) => at !== null && at !== undefined);
    box.hidden = !near.length;
    if (!near.length) return;
    box.replaceChildren(h("b", {}, place(chart.data[0][near[0].at])), ...near.map(({ line, at }) =>
      h("div", {}, h("i", { style: { background: line.colour } }), `${show(chart.data[line.series][at])} ${line.name}`)));
    const right = chart.cursor.left > chart.over.clientWidth / 2;
    Object.assign(box.style, right ? { right: `${chart.over.clientWidth - chart.cursor.left + 10}px`, left: "" } : { left: `${chart.cursor.left + 10}px`, right: "" });
  };
  return { hooks: { init: (chart) => chart.over.append(box), setCursor: move } };
}

// lines: {name, x, y, low, high, colour, dotted}; `low` and `high` make a band. x is a step, or seconds where `time` is true.
export function draw(element, lines, { log = false, time = false, weight = 0, share = false, zero = false } = {}) {
  for (const one of drawn) if (!one.isConnected || one === element) forget(one);
  if (!element.isConnected) return;
  const flat = lines.every((line) => line.y.every((value) => !value));
  const logarithmic = log && !flat;
  const [series, tables, bands, shown] = [[{}], [], [], []];
  for (const line of lines) {
    if (line.low && !log) {
      bands.push({ series: [series.length + 1, series.length], fill: `${line.colour}29` });
      for (const edge of [line.low, line.high]) {
        series.push({ spanGaps: true, width: 0, points: { show: false } });
        tables.push([line.x, smoothed(edge, weight)]);
      }
    }
    const few = line.y.filter((value) => value !== null).length < FEW;
    const y = smoothed(line.y, weight).map((value) => (logarithmic && value <= 0 ? null : value));
    shown.push({ name: line.name, colour: line.colour, series: series.length });
    series.push({ label: line.name, stroke: line.colour, width: 1.8, dash: line.dotted ? [2, 3] : [], spanGaps: true, points: { show: few, size: 5, fill: line.colour } });
    tables.push([line.x, y]);
  }
  const axis = { stroke: style("--faint"), font: `11px ${style("--sans")}`, ticks: { show: false }, gap: 6 };
  const labels = logarithmic ? (value) => value?.toExponential(0).replace("e+", "e") ?? "" : share ? (value) => `${Number((100 * value).toFixed(2))}%` : short;
  const decades = (_, values) => (logarithmic ? values.map((value) => (Number.isInteger(Math.log10(value)) ? value : null)) : values);
  const options = {
    ...size(element), padding: [6, 14, 0, 0], legend: { show: false }, series, bands,
    cursor: { y: false, hover: { prox: NEAR, skip: [null] } },
    scales: {
      x: { time, range: (chart, least, most) => (chart.data[0].length === 1 ? [chart.data[0][0] - 0.5, chart.data[0][0] + 0.5] : [least, most]) },
      y: logarithmic ? { distr: 3 } : { range: (_, least, most) => (flat || least === null ? [0, 1] : uPlot.rangeNum(zero ? Math.min(least, 0) : least, most, 0.1, true)) },
    },
    axes: [
      { ...axis, size: 26, space: 55, grid: { show: false }, ...(time ? { values: (_, times, nth, space, between) => times.map((at) => clock(at, between < 60)) } : { incrs: WHOLE, values: (_, values) => values.map(short) }) },
      { ...axis, size: 46, space: 30, grid: { stroke: style("--line"), width: 1, filter: decades }, values: (_, values) => values.map(labels) },
    ],
    plugins: [tooltip(shown, (x) => (time ? clock(x, true) : `step ${x}`), share ? (value) => `${(100 * value).toFixed(1)}%` : number)],
  };
  element.chart = new uPlot(options, uPlot.join(tables), element);
  drawn.add(element);
  resized.observe(element);
}

// A number on an axis, in at most six characters or so.
function short(value) {
  const size = Math.abs(value);
  return size !== 0 && (size >= 1e6 || size < 1e-4) ? value.toExponential(1).replace("e+", "e").replace(".0e", "e") : String(Number(value.toPrecision(6)));
}
