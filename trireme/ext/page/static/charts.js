// Curves by uPlot (trireme/ext/page/uplot), which index.html loads.
import { clock, h, number } from "./dom.js";

const COLOURS = ["#15808f", "#c25b2a", "#6553a8", "#3f8c4a", "#b0437c", "#8a7420", "#3a6fc4", "#7a7f86"];
export const colour = (place) => COLOURS[place % COLOURS.length];
const NEAR = 20; // pixels between the pointer and a value that is shown
const FEW = 25; // values that are shown as points, too
const CLOCK = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 72000, 172800, 432000, 864000];
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

const isTen = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;

// Of the ticks of a logarithmic axis those that have room: some tens, else 1, 2 and 5 of each.
export function roomy(values) {
  const tens = values.filter(isTen);
  const nth = Math.ceil(tens.length / 5);
  if (tens.length > 2) return values.map((value) => (isTen(value) && Math.round(Math.log10(value)) % nth === 0 ? value : null));
  return values.map((value) => (values.length <= 6 || /^[125]/.test(value.toExponential(1)) ? value : null));
}

// Percentages with the digits that the ticks have.
export function percents(values) {
  const whole = (value, digits) => Math.abs(100 * value * 10 ** digits - Math.round(100 * value * 10 ** digits)) < 1e-4;
  const digits = [...Array(9).keys()].find((count) => values.every((value) => whole(value, count))) ?? 8;
  return values.map((value) => `${(100 * value).toFixed(digits)}%`);
}

// Where a band may not go: past what is possible.
export const within = (values, low, high) => values.map((value) => (value === null ? null : Math.min(Math.max(value, low), high)));

// What is on the horizontal axis: its ticks, and a place in words.
export const AXES = {
  step: { incrs: WHOLE, tick: short, place: (x) => `step ${x}` },
  time: { incrs: CLOCK, tick: clock, place: (x) => `after ${clock(x)}` },
  tokens: { incrs: WHOLE, tick: (x) => (x >= 1e6 ? `${Number((x / 1e6).toPrecision(3))}M` : x >= 1e3 ? `${Number((x / 1e3).toPrecision(3))}k` : String(x)), place: (x) => `${Math.round(x).toLocaleString("en")} tokens` },
};

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

// lines: {name, x, y, low, high, colour, dotted}; `low` and `high` make a band. `axis` says what x is: step, time or tokens.
// `ends`: of the axes {x, y} where they do not follow from the lines; `plugin`: in place of the lines' values under the pointer.
export function draw(element, lines, { log = false, axis: along = "step", weight = 0, share = false, zero = false, ends = null, plugin = null } = {}) {
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
    if (weight > 0) { // as it was measured, behind
      series.push({ stroke: `${line.colour}40`, width: 1, spanGaps: true, points: { show: false } });
      tables.push([line.x, line.y.map((value) => (logarithmic && value <= 0 ? null : value))]);
    }
    shown.push({ name: line.name, colour: line.colour, series: series.length });
    series.push({ label: line.name, stroke: line.colour, width: 1.8, dash: line.dotted ? [2, 3] : [], spanGaps: true, points: { show: few, size: 5, fill: line.colour } });
    tables.push([line.x, y]);
  }
  const { incrs, tick, place } = AXES[along];
  const axis = { stroke: style("--faint"), font: `11px ${style("--sans")}`, ticks: { show: false }, gap: 6 };
  const labels = logarithmic ? (values) => values.map((value) => value?.toExponential(0).replace("e+", "e") ?? "") : share ? percents : (values) => values.map(short);
  const decades = (_, values) => (logarithmic ? values.map((value) => (isTen(value) ? value : null)) : values);
  const options = {
    ...size(element), padding: [6, 14, 0, 0], legend: { show: false }, series, bands,
    cursor: { y: false, hover: { prox: NEAR, skip: [null] } },
    scales: {
      x: { time: false, range: (chart, least, most) => (ends && least === chart.data[0][0] && most === chart.data[0].at(-1) ? ends.x : chart.data[0].length === 1 ? [chart.data[0][0] - 0.5, chart.data[0][0] + 0.5] : [least, most]) },
      y: ends ? { range: ends.y } : logarithmic ? { distr: 3 } : { range: (_, least, most) => (flat || least === null ? [0, 1] : uPlot.rangeNum(zero ? Math.min(least, 0) : least, most, 0.1, true)) },
    },
    axes: [
      { ...axis, size: 26, space: 55, grid: { show: false }, incrs, values: (_, values) => values.map(tick) },
      { ...axis, size: 46, space: 30, grid: { stroke: style("--line"), width: 1, filter: decades }, ...(logarithmic ? { filter: (_, values) => roomy(values) } : {}), values: (_, values) => labels(values) },
    ],
    plugins: [plugin ?? tooltip(shown, place, share ? (value) => `${(100 * value).toFixed(1)}%` : number)],
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
