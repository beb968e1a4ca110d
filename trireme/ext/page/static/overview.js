// Is it learning, and what is wrong?
import { ask } from "./api.js";
import { colour, draw, within } from "./charts.js";
import { empty, fill, first, h, last, number, percent, seconds, segments } from "./dom.js";
import { rewards } from "./rewards.js";
import { ending, progress } from "./states.js";
import { figures } from "./table.js";

// Panels in their order; a panel is there where a chosen run has one of its metrics.
const PANELS = [
  { title: "Reward", what: "mean of sampled rollouts, 95% interval", part: "explorer", metrics: ["rollout/reward/mean"], band: interval },
  { title: "Held-out tasks", what: "accuracy or reward, 95% interval", part: "eval", instead: "bench", match: /^(?:eval|bench)\/.+\/(accuracy)\/mean@\d+$/, other: /^(?:eval|bench)\/.+\/(reward)\/mean@\d+$/, band: binomial },
  { title: "Reply length", what: "tokens; shortest to longest", part: "explorer", metrics: ["rollout/response_length/mean"], band: extremes },
  { title: "Loss", what: "of the supervised data", part: "trainer", metrics: ["actor/sft_loss", "actor/dpo_loss", "actor/cpt_loss"] },
  { title: "Entropy", what: "of the policy on trained tokens", part: "trainer", metrics: ["actor/entropy"] },
  { title: "KL to the reference", what: "as it enters the loss", part: "trainer", metrics: ["actor/kl_loss"] },
  { title: "KL to the sampler", what: "mean log-ratio of the trained tokens", part: "trainer", metrics: ["actor/ppo_kl"] },
  { title: "Clip share", what: "tokens whose ratio was clipped", part: "trainer", metrics: ["actor/pg_clipfrac"], share: true },
  { title: "Log-probability gap", what: "|engine − trainer|; dotted: the largest", part: "trainer", metrics: ["rollout/logprob_diff_mean", "rollout/logprob_diff_max"], log: true },
  { title: "Staleness", what: "pushes since sampling; dotted: the oldest", part: "trainer", metrics: ["rollout/staleness_mean", "rollout/staleness_max"] },
  { title: "Groups without gradient", what: "all rollouts have the same reward", part: "explorer", metrics: ["experience_pipeline/zero_std_groups"], share: true },
  { title: "Gradient norm", what: "before clipping", part: "trainer", metrics: ["actor/grad_norm"] },
  { title: "Cut replies", what: "ended by the length limit", part: "explorer", metrics: ["rollout/truncated/mean"], share: true },
  { title: "Failed rollouts", what: "errors, time-outs, empty ones; per step", part: "explorer", metrics: ["rollout/failed"] },
  { title: "Learning rate", what: "", part: "trainer", metrics: ["actor/lr"] },
  { title: "Tokens per second", what: "sampled by the engine", part: "explorer", metrics: ["perf/tokens_per_s"] },
];

const ALWAYS = new Set(["Reward", "Held-out tasks"]); // a curve at 0 is the answer there

// Bands: the functions give a line's lower and upper edge.
const around = (y, half) => ({ low: y.map((value, at) => (value === null ? null : value - half(value, at))), high: y.map((value, at) => (value === null ? null : value + half(value, at))) });
const clamped = ({ low, high }, least, most) => ({ low: within(low, least, most), high: within(high, least, most) });
const known = (values) => (values ?? []).filter((value) => value !== null);

function interval(metrics, name, y) {
  const [std, runs] = [metrics["rollout/reward/std"], metrics["rollout/runs"]];
  if (!std || !runs) return null;
  const band = around(y, (value, at) => (std[at] === null ? 0 : (1.96 * std[at]) / Math.sqrt(Math.max(runs[at] ?? 1, 1))));
  const [low, high] = [known(metrics["rollout/reward/min"]), known(metrics["rollout/reward/max"])];
  return low.length && high.length ? clamped(band, low.reduce((a, b) => Math.min(a, b)), high.reduce((a, b) => Math.max(a, b))) : band;
}

function binomial(metrics, name, y) {
  const tasks = metrics[name.replace(/\/[^/]+\/mean@\d+$/, "/tasks")];
  if (!tasks || !name.includes("/accuracy/")) return null;
  return clamped(around(y, (value, at) => 1.96 * Math.sqrt(Math.max(value * (1 - value), 0) / Math.max(tasks[at] ?? 1, 1))), 0, 1);
}

function extremes(metrics, name) {
  const [low, high] = [metrics[name.replace("/mean", "/min")], metrics[name.replace("/mean", "/max")]];
  return low && high ? { low, high } : null;
}

const SECTIONS = ["Is it learning?", "The update of the policy", "Rollouts", "Freshness and data", "Time"]; // in this order, and then others
const settings = { weight: 0, axis: "step", all: "", sections: new Set([SECTIONS[0]]) };

// What is on the horizontal axis of a part's curves: the step, or since its beginning the seconds or the trained tokens.
function along(curves, part) {
  if (settings.axis === "step") return part.steps;
  if (settings.axis === "time") {
    const began = Math.min(...Object.values(curves).flatMap((one) => one.times[0] ?? []));
    return part.times.map((time) => time - began);
  }
  const { steps, metrics } = curves.trainer ?? curves.explorer ?? part;
  const each = metrics["perf/trained_tokens"] ?? (metrics["rollout/runs"] ?? []).map((runs, at) => runs * (metrics["rollout/response_length/mean"]?.[at] ?? 0));
  let [sum, place, before] = [0, 0, 0];
  return part.steps.map((step) => {
    for (; place < steps.length && steps[place] <= step; place += 1) { sum += (each[place] ?? 0) * (steps[place] - before); before = steps[place]; } // a long curve is thinned
    return sum;
  });
}

// Lines of a panel, for each run its metrics.
function linesOf(panel, runs) {
  const lines = [];
  for (const { name, curves, place } of runs) {
    const part = curves[panel.part] ?? curves[panel.instead]; // a run that only measures has no evaluations
    if (!part) continue;
    const x = along(curves, part);
    let names = panel.metrics?.filter((metric) => part.metrics[metric]) ?? [];
    for (const pattern of [panel.match, panel.other]) if (pattern && !names.length) names = Object.keys(part.metrics).filter((metric) => pattern.test(metric));
    names.forEach((metric, nth) => {
      const y = part.metrics[metric];
      if (y.every((value) => value === null)) return;
      const line = { name: runs.length > 1 ? `${short(name)} ${nth ? metric.split("/").at(-1) : ""}` : metric, run: name, metric, x, y, colour: colour(place), dotted: nth > 0 };
      Object.assign(line, panel.band?.(part.metrics, metric, y));
      lines.push(line);
    });
  }
  return lines;
}

export const short = (name) => name.split("/").slice(-2).join("/");

function tiles(run) {
  const { explorer, trainer } = run.curves;
  const evaluation = run.curves.eval ?? run.curves.bench;
  const out = [];
  const add = (label, value, more = "") => out.push(h("div.card.tile", {}, h("div.label", {}, label), h("div.value", {}, value), h("div.more", {}, more)));
  add("Step", number(run.info.step), run.info.state === "finished" ? "finished" : progress(run.info).replace(/^step \d+ ?/, ""));
  const rewards = explorer?.metrics["rollout/reward/mean"];
  if (rewards) add("Reward, sampled", number(last(rewards)), change(first(rewards), last(rewards), number));
  if (evaluation) {
    const name = Object.keys(evaluation.metrics).find((metric) => /\/accuracy\/mean@/.test(metric)) ?? Object.keys(evaluation.metrics).find((metric) => /\/reward\/mean@/.test(metric));
    if (name) {
      const values = evaluation.metrics[name];
      const show = name.includes("accuracy") ? percent : number;
      add(name.includes("accuracy") ? "Held-out accuracy" : "Held-out reward", show(last(values)), change(first(values), last(values), show));
    }
  }
  const loss = trainer?.metrics["actor/sft_loss"];
  if (loss) add("Loss", number(last(loss)), `from ${number(first(loss))}`);
  const lengths = explorer?.metrics["rollout/response_length/mean"];
  if (lengths) add("Reply length", `${number(last(lengths), 1)}`, "tokens, mean");
  const failed = explorer?.metrics["rollout/failed"];
  if (failed) add("Failed rollouts", number(failed.reduce((sum, value) => sum + (value ?? 0), 0)), "in all steps shown");
  const times = [trainer, explorer, evaluation].flatMap((part) => part?.times ?? []);
  if (times.length > 1) add("Time", seconds(Math.max(...times) - Math.min(...times)), "first to last step");
  return h("div.tiles", {}, out);
}

function change(from, to, show) {
  if (from === null || from === to) return "";
  return [`from ${show(from)} `, h(to > from ? "span.up" : "span.down", {}, to > from ? "▲" : "▼")];
}

function warnings(info) {
  return info.warnings.map((one) => {
    const [seen, advice] = one.text.split(". What to do: ");
    return h("div.card.warning", {}, h("h3", {}, `${one.cause.replaceAll("_", " ")}, ${one.part} step ${one.step}`),
      h("p", {}, `${seen}.`), advice && h("p.do", {}, `What to do: ${advice}`), one.sample && h("pre", {}, one.sample));
  });
}

const meanings = {}; // of metrics, by their names
const asked = new Set();
let watcher = null;

export async function overview(main, state) {
  const { turn } = state;
  const chosen = await Promise.all(state.shown.map(async (info) => ({
    info, name: info.name, place: state.runs.indexOf(info), curves: await ask("curves", { run: info.name }),
  })));
  for (const { name } of chosen) if (!asked.has(name)) { asked.add(name); Object.assign(meanings, await ask("meanings", { run: name })); }
  if (turn !== state.turn) return;
  const principal = chosen.find((run) => run.name === state.run) ?? chosen[0];
  const panels = PANELS.map((panel) => ({ ...panel, lines: linesOf(panel, chosen) })).filter((panel) => panel.lines.length);
  if (!panels.length) {
    const ended = ending(principal.info);
    fill(main, ended ?? empty("Nothing has been measured yet", "The first step of this run has not ended. This page shows it when it has."));
    return;
  }
  watcher?.disconnect();
  watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); entry.target.draw(); }
  }, { rootMargin: "300px" });
  const weight = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: settings.weight, "aria-label": "Smoothing", oninput: (event) => { settings.weight = Number(event.target.value); redraw(); } });
  const flat = panels.filter(isFlat);
  const redraw = () => { for (const plot of main.querySelectorAll(".plot")) plot.draw(); };
  const everything = h("div.spaced");
  const more = h("details", { open: settings.open, ontoggle: (event) => { settings.open = event.target.open; if (settings.open) showAll(everything, chosen); } },
    h("summary", {}, h("b", {}, "All metrics")),
    h("div.spaced", { style: { "margin-top": "12px" } }, h("input", { type: "search", placeholder: "Filter metrics by name", value: settings.all, oninput: (event) => { settings.all = event.target.value; showAll(everything, chosen); } }), everything));
  const page = h("div.spaced", {},
    ending(principal.info),
    chosen.length === 1 && principal.info.note && h("p.quiet", { style: { "white-space": "pre-wrap" } }, principal.info.note),
    chosen.length > 1 ? figures(chosen.map((run) => run.info), state) : tiles(principal),
    warnings(principal.info),
    h("div.bar", {}, h("h2.grow", {}, chosen.length > 1 ? `${chosen.length} runs` : short(principal.name)),
      h("label", {}, "Smoothing", weight),
      segments([["step", "By step"], ["time", "By time"], ["tokens", "By tokens"]], settings.axis, (value) => { settings.axis = value; state.again(); }, "Horizontal axis")),
    h("div.panels", {}, panels.filter((panel) => !isFlat(panel)).map((panel) => [panelCard(panel, principal.name), panel.title === "Reward" && distributions(chosen, state)])),
    level("Zero at every step", flat),
    more);
  const scroll = scrollY;
  fill(main, page);
  scrollTo(0, scroll);
  for (const plot of main.querySelectorAll(".plot")) watcher.observe(plot);
  if (settings.open) showAll(everything, chosen);
}

const isFlat = (panel) => !ALWAYS.has(panel.title) && panel.lines.every((line) => line.y.every((value) => !value));

const isConstant = ({ lines }) => { const values = lines.flatMap((line) => known(line.y)); return values.length > lines.length && values.every((value) => value === values[0]); };

// Charts that would be a level line, in one line of text.
const level = (how, panels, more = () => "") => panels.length > 0 && h("p.card.flat", {}, h("b", {}, `${how}: `), panels.map((panel, at) => h("span", { title: panel.what || null }, `${at ? ", " : ""}${panel.title}${more(panel)}`)), ".");

// The cards of runs whose rewards differ within a step, each beside the mean.
function distributions(runs, state) {
  return runs.map(({ name, info, curves, place }) => {
    const { steps, metrics } = curves.explorer ?? { steps: [], metrics: {} };
    const y = metrics["rollout/reward/mean"];
    const [low, high] = [known(metrics["rollout/reward/min"]), known(metrics["rollout/reward/max"])];
    if (!y || (low.length && low.every((value) => value === low[0]) && high.every((value) => value === low[0]))) return null;
    return rewards({ run: name, generation: info.generation, steps, line: { name, x: along(curves, curves.explorer), y, colour: colour(place) }, axis: settings.axis, weight: () => settings.weight, several: runs.length > 1 && short(name), state });
  });
}

function panelCard(panel, principal) {
  const main = panel.lines.find((line) => line.run === principal) ?? panel.lines[0];
  const now = last(main.y);
  const show = (value) => (share ? percent(value) : number(value));
  const of = [...new Set(panel.lines.map((line) => line.run))].map((run) => panel.lines.find((line) => line.run === run));
  const share = panel.share || /accuracy/.test(main.metric);
  const plot = h("div.plot", { role: "img", "aria-label": `${panel.title}, now ${number(now)}` });
  plot.draw = () => draw(plot, panel.lines, { log: panel.log, axis: settings.axis, weight: settings.weight, share, zero: panel.share });
  const known = meanings[main.metric];
  const told = known && [known.meaning, known.healthy && `Healthy: ${known.healthy}.`, known.otherwise && `Otherwise: ${known.otherwise}.`].filter(Boolean).join("\n");
  return h("section.card.panel", { title: told || null }, h("div.head", {}, h("h3", {}, panel.title), h("span.now", {}, of.length > 1 ? of.map((line) => h("span", { title: line.run, style: { color: line.colour } }, show(last(line.y)))) : show(now))), h("div.what", {}, panel.what), plot);
}

function showAll(element, chosen) {
  const names = new Map();
  for (const { curves } of chosen) for (const [part, { metrics }] of Object.entries(curves)) for (const metric of Object.keys(metrics)) names.set(`${part} ${metric}`, [part, metric]);
  const wanted = [...names.values()].filter(([part, metric]) => `${part} ${metric}`.includes(settings.all)).sort((a, b) => a[1].localeCompare(b[1]));
  const sections = new Map(SECTIONS.map((name) => [name, []]));
  for (const [part, metric] of wanted) {
    const section = meanings[metric]?.section ?? "Others";
    if (!sections.has(section)) sections.set(section, []);
    sections.get(section).push({ title: metric, what: meanings[metric]?.meaning ?? part, part, lines: linesOf({ part, metrics: [metric] }, chosen) });
  }
  fill(element, [...sections].map(([name, all]) => [all.filter((panel) => panel.lines.length), name]).filter(([all]) => all.length).map(([all, name]) => h("details.section", { open: Boolean(settings.all) || settings.sections.has(name),
    ontoggle: (event) => { if (event.target.open) settings.sections.add(name); else settings.sections.delete(name); } },
  h("summary", {}, h("b", {}, name), h("span.faint", {}, `  ${all.length}`)), h("div.panels", {}, all.filter((panel) => !isConstant(panel)).map((panel) => panelCard(panel, chosen[0].name))), level("The same at every step", all.filter(isConstant), ({ lines }) => ` ${number(first(lines[0].y))}`))));
  for (const plot of element.querySelectorAll(".plot")) watcher.observe(plot);
}
