// Curves by plotly, which comes from its installed package and is loaded after the first paint.

const COLOURS = ["#15808f", "#c25b2a", "#6553a8", "#3f8c4a", "#b0437c", "#8a7420", "#3a6fc4", "#7a7f86"];
export const colour = (place) => COLOURS[place % COLOURS.length];

let loading = null;
export function library() {
  loading ??= globalThis.Plotly ? Promise.resolve(globalThis.Plotly) : new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => resolve(globalThis.Plotly);
    script.onerror = () => reject(new Error("the chart library could not be loaded"));
    document.head.append(script);
  });
  return loading;
}

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

function faded(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

const drawn = new Set(); // plotly listens to the window for each of them until it is told to stop

function forgetRemoved(Plotly) {
  for (const element of drawn) if (!element.isConnected) { Plotly.purge(element); drawn.delete(element); }
}

// lines: {name, x, y, low, high, colour, dash}; `low` and `high` make a band.
export async function draw(element, lines, { log = false, time = false, weight = 0, share = false, zero = false } = {}) {
  const Plotly = await library();
  forgetRemoved(Plotly);
  if (!element.isConnected) return;
  drawn.add(element);
  const traces = [];
  for (const line of lines) {
    const few = line.y.filter((value) => value !== null).length < 25;
    if (line.low && !log) {
      const plain = { x: line.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, connectgaps: true };
      traces.push({ ...plain, y: smoothed(line.low, weight) });
      traces.push({ ...plain, y: smoothed(line.high, weight), fill: "tonexty", fillcolor: faded(line.colour, 0.16) });
    }
    traces.push({
      x: line.x, y: smoothed(line.y, weight), name: line.name, mode: few ? "lines+markers" : "lines", connectgaps: true,
      line: { color: line.colour, width: 1.8, dash: line.dash ?? "solid" }, marker: { size: 5 },
      hovertemplate: `%{y:${share ? ".1%" : ".4~g"}}<extra>${line.name.replace(/[<>]/g, "")}</extra>`,
    });
  }
  const steps = lines.flatMap((line) => line.x);
  const whole = !time && steps.reduce((most, step) => Math.max(most, step), -1) - steps.reduce((least, step) => Math.min(least, step), Infinity) < 6 ? { dtick: 1 } : {}; // of half steps a label would stand twice
  const flat = lines.every((line) => line.y.every((value) => !value));
  const axis = { gridcolor: style("--line"), zeroline: false, color: style("--faint"), tickfont: { size: 11 }, fixedrange: true };
  const layout = {
    margin: { l: 46, r: 8, t: 6, b: 26 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false,
    font: { family: style("--sans"), color: style("--soft") }, hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: style("--surface"), bordercolor: style("--line-strong"), font: { size: 12, color: style("--ink") } },
    xaxis: { ...axis, fixedrange: false, showgrid: false, type: time ? "date" : "linear", tickformat: time ? "%H:%M" : "d", nticks: 6, ...whole },
    yaxis: { ...axis, type: log ? "log" : "linear", tickformat: share ? ".0%" : log ? ".0e" : ".3~g", nticks: 5, rangemode: zero ? "tozero" : "normal", ...(flat ? { range: [0, 1], autorange: false } : {}) },
  };
  await Plotly.react(element, traces, layout, { displayModeBar: false, responsive: true });
}
