// How are a step's rewards distributed, which their mean does not say? Each step's rollouts by reward, as shades.
import { ask, isReport } from "./api.js";
import { AXES, draw } from "./charts.js";
import { fill, h, number, percent } from "./dom.js";

const answers = new Map(); // of runs: what was answered for which state of the run
const FAINTEST = 0.09; // of a place with a single rollout
const LABELLED = 11; // rows that have room for a label each

// A place in the list `from` as the same place in the list `to`.
function translated(value, from, to) {
  const after = from.findIndex((one) => one >= value);
  if (after <= 0) return after < 0 ? to.at(-1) : to[0];
  return to[after - 1] + ((value - from[after - 1]) / (from[after] - from[after - 1])) * (to[after] - to[after - 1]);
}

// The edges of columns: halfway between their middles.
function edgesOf(columns, steps, x, axis) {
  const middle = ([first, last]) => (axis === "step" ? (first + last) / 2 : translated((first + last) / 2, steps, x));
  const middles = columns.map(middle);
  const halves = middles.slice(1).map((value, at) => (value + middles[at]) / 2);
  const half = (one, other) => (one === undefined ? 0.5 : Math.abs(one - other));
  return [middles[0] - half(halves[0], middles[0]), ...halves, middles.at(-1) + half(halves.at(-1), middles.at(-1))];
}

const extent = ([low, high]) => (low === high ? number(low) : `${number(low)} to ${number(high)}`);
const total = (counts) => counts.reduce((sum, count) => sum + count, 0);

// `20% at 0 · 80% at 1`, where there are few; of many the middle one.
function summary({ rows, counts }) {
  const last = counts.at(-1);
  const there = rows.map((row, at) => [row, last[at]]).filter(([, count]) => count);
  if (there.length <= 3) return there.map(([row, count]) => `${Math.round((100 * count) / total(last))}% at ${extent(row)}`).join(" · ");
  let below = 0;
  const [row] = there.find(([, count]) => { below += count; return 2 * below >= total(last); });
  return row[0] === row[1] ? `median ${number(row[0])}` : `median ≈ ${number((row[0] + row[1]) / 2, 2)}`;
}

// The cells, and what they count under the pointer.
function cells(found, edges, colour, open) {
  const { columns, middles, rows, counts } = found;
  const half = (middles[1] - middles[0]) / 2;
  const shares = counts.map((column) => { const all = total(column); return column.map((count) => count / all); });
  const most = Math.max(...shares.map((column) => Math.max(...column)));
  const box = h("div.tooltip.counts", { hidden: true });
  const at = (chart) => {
    const [x, y] = [chart.posToVal(chart.cursor.left, "x"), chart.posToVal(chart.cursor.top, "y")];
    const column = edges.findIndex((edge, nth) => edge <= x && x < edges[nth + 1]);
    const row = Math.round((y - middles[0]) / (2 * half));
    return chart.cursor.left < 0 || column < 0 || column >= columns.length ? null : { column, row: Math.min(Math.max(row, 0), rows.length - 1) };
  };
  const paint = (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.fillStyle = colour;
    const [xs, ys] = [edges.map((edge) => Math.round(chart.valToPos(edge, "x", true))), [...middles, middles.at(-1) + 2 * half].map((middle) => Math.round(chart.valToPos(middle - half, "y", true)))];
    shares.forEach((column, c) => column.forEach((share, r) => {
      if (!share) return;
      ctx.globalAlpha = FAINTEST + (1 - FAINTEST) * (share / most) ** 0.8;
      ctx.fillRect(xs[c], ys[r + 1], Math.max(xs[c + 1] - xs[c], 1), ys[r] - ys[r + 1]);
    }));
    ctx.restore();
  };
  const move = (chart) => {
    const here = at(chart);
    box.hidden = !here;
    if (!here) return;
    const [[first, last], column, all] = [columns[here.column], counts[here.column], total(counts[here.column])];
    const widest = Math.max(...column);
    const few = rows.length <= LABELLED;
    const text = (row) => `${column[row]} of ${all}, ${percent(column[row] / all)}`;
    const bars = [...rows.keys()].reverse().filter((row) => !few || rows[row]).map((row) => h(`div.count${row === here.row ? ".on" : ""}`, {},
      few && h("span", {}, extent(rows[row])), h("i", { style: { width: `${(100 * column[row]) / widest}px`, background: colour } }), few && h("span", {}, column[row])));
    fill(box, h("b", {}, first === last ? `step ${first}` : `steps ${first} to ${last}`), rows[here.row] ? [h("div", {}, `reward ${extent(rows[here.row])}`), h("div", {}, text(here.row))] : h("div", {}, `${all} rollouts`), h(`div.bars${few ? "" : ".many"}`, {}, bars));
    const right = chart.cursor.left > chart.over.clientWidth / 2;
    Object.assign(box.style, right ? { right: `${chart.over.clientWidth - chart.cursor.left + 10}px`, left: "" } : { left: `${chart.cursor.left + 10}px`, right: "" });
  };
  const click = (chart) => {
    const here = at(chart);
    if (here && rows[here.row] && counts[here.column][here.row]) open(columns[here.column][1], ...rows[here.row]);
  };
  const init = (chart) => {
    chart.over.append(box);
    if (!isReport) { chart.over.style.cursor = "pointer"; chart.over.addEventListener("click", () => click(chart)); }
  };
  return { hooks: { init, drawAxes: paint, setCursor: move } };
}

// The mean of each column's steps, at its middle.
function means({ columns }, steps, { x, y }) {
  let at = 0;
  return columns.map(([first, last]) => {
    let [sum, places, count] = [0, 0, 0];
    for (; at < steps.length && steps[at] <= last; at += 1) if (steps[at] >= first && y[at] !== null) { sum += y[at]; places += x[at]; count += 1; }
    return count ? [places / count, sum / count] : null;
  }).filter(Boolean);
}

// The card of a run whose rewards differ. `line`: its mean reward at `steps`; `weight`: of its smoothing, now.
export function rewards({ run, generation, steps, line, axis, weight, several, state }) {
  const now = h("span.now");
  const plot = h("div.plot.rewards", { role: "img" });
  const card = h("section.card.panel", {}, h("div.head", {}, h("h3", {}, several ? `Rewards of ${several}` : "Distribution of rewards"), now),
    h("div.what", {}, `share of rollouts; line: mean${isReport ? "" : "; click to read them"}`), plot);
  const show = (found) => {
    if (!found) return card.remove();
    const edges = edgesOf(found.columns, steps, line.x, axis);
    const half = (found.middles[1] - found.middles[0]) / 2;
    const mean = means(found, steps, line);
    const open = (step, least, most) => state.go("rollouts", { step, least, most }, false);
    now.textContent = summary(found);
    plot.setAttribute("aria-label", `Distribution of rewards, in the newest step ${now.textContent}`);
    draw(plot, [{ ...line, x: mean.map(([x]) => x), y: mean.map(([, y]) => y), colour: getComputedStyle(plot).getPropertyValue("--ink").trim() }],
      { axis, weight: weight(), ends: { x: [edges[0], edges.at(-1)], y: [found.middles[0] - half, found.middles.at(-1) + half] }, plugin: cells(found, edges, line.colour, open) });
  };
  plot.draw = async () => {
    const known = answers.get(run);
    if (known) show(known.found);
    if (known?.generation === generation) return;
    try {
      const found = await ask("rewards", { run });
      answers.set(run, { generation, found });
      show(found);
    } catch (error) { fill(plot, h("p.faint", {}, error.message)); }
  };
  return card;
}
