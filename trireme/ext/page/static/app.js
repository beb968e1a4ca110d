// The frame: which runs are shown, which view, and what comes new while a run goes on.
import { about } from "./about.js";
import { ask, isReport } from "./api.js";
import { colour } from "./charts.js";
import { ago, fill, h, svg } from "./dom.js";
import { overview } from "./overview.js";
import { key as rolloutKey, rollouts } from "./rollouts.js";
import { badge, progress } from "./states.js";
import { table } from "./table.js";
import { timeline } from "./timeline.js";

const VIEWS = [["overview", "Overview", overview], ["runs", "Runs", table], ["rollouts", "Rollouts", rollouts], ["timeline", "Timeline", timeline], ["run", "Configuration", about]];
const EVERY = 2000; // milliseconds between two looks at a run that goes on
const main = document.getElementById("main");
// `turn` counts the views begun: one that was waiting when the next began draws nothing
const state = { runs: [], run: "", also: [], view: "overview", query: {}, shown: [], turn: 0 };

function readHash() {
  const [path, query] = location.hash.slice(2).split("?");
  const values = Object.fromEntries(new URLSearchParams(query ?? ""));
  state.view = VIEWS.some(([name]) => name === path) ? path : "overview";
  const names = state.runs.map((run) => run.name);
  state.run = names.includes(values.run) ? values.run : best();
  state.also = (values.also ?? "").split("|").filter((name) => names.includes(name) && name !== state.run);
  delete values.run;
  delete values.also;
  state.query = values;
  state.shown = state.runs.filter((run) => run.name === state.run || state.also.includes(run.name));
}

// Of several runs the one that goes on, else the last one that explored a step, else the last one.
function best() {
  const last = (wanted) => state.runs.filter((run) => !run.hidden).filter(wanted).at(-1);
  return (last((run) => run.state === "running") ?? last((run) => run.mode !== "train" && run.step) ?? last((run) => run.step) ?? state.runs.at(-1))?.name ?? "";
}

state.href = (view, query = {}, run = state.run, also = state.also) => {
  const values = { run, ...(also.length ? { also: also.join("|") } : {}), ...query };
  return `#/${view}?${new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined))}`;
};
state.go = (view, query, replace = false) => {
  const href = state.href(view, query);
  if (replace) { history.replaceState(null, "", href); route(); } else location.hash = href.slice(1);
};

function top() {
  const mark = svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: "M1 9h14l-3 4H4zM7 2l6 6H7z", fill: "currentColor" }));
  fill(document.getElementById("top"),
    h("button.button.menu", { type: "button", "aria-label": "Runs", onclick: () => document.body.classList.toggle("menu-open") }, "☰"),
    h("a.brand", { href: state.href("overview") }, mark, h("span", {}, "Trireme")),
    h("nav", { "aria-label": "Views" }, VIEWS.map(([name, title]) => h("a", { href: state.href(name), "aria-current": name === state.view ? "page" : null }, title))),
    h("span.grow"),
    h("button.button.plain", { type: "button", title: "Keys (?)", "aria-label": "Keys", onclick: help }, "?"),
    h("button.button.plain", { type: "button", title: "Light or dark", onclick: switchTheme }, "Theme"));
}

function side() {
  let job = null;
  const rows = [];
  state.runs.forEach((run, place) => {
    if (run.hidden && !state.shown.includes(run)) return;
    const parts = run.name.split("/");
    const above = parts.slice(0, -1).join("/");
    if (above !== job && (above || job)) rows.push(h("div.job", {}, above));
    job = above;
    const on = state.shown.includes(run);
    const toggle = () => {
      const also = on ? state.also.filter((name) => name !== run.name) : [...state.also, run.name];
      if (run.name !== state.run) location.hash = state.href(state.view, {}, state.run, also).slice(1);
      else if (also.length) location.hash = state.href(state.view, {}, also[0], also.slice(1)).slice(1);
      else side();
    };
    const said = [run.kind, run.state !== "finished" && progress(run), run.warnings.length && `${run.warnings.length} warning${run.warnings.length > 1 ? "s" : ""}`, isReport ? null : ago(run.updated)].filter(Boolean).join(" · ");
    rows.push(h(`div.run${run.name === state.run ? ".main" : ""}`, { style: { "--colour": colour(place) } },
      h("input", { type: "checkbox", checked: on, title: "Show beside the others", "aria-label": `Show ${run.name}`, onchange: toggle }),
      h("button.name", { type: "button", "aria-current": run.name === state.run ? "true" : null, onclick: () => { location.hash = state.href(state.view, {}, run.name, state.also.filter((name) => name !== run.name)).slice(1); document.body.classList.remove("menu-open"); } }, parts.at(-1)),
      h("div.under", {}, badge(run), said)));
  });
  fill(document.getElementById("side"), h("h2", {}, state.runs.length === 1 ? "Run" : "Runs"), rows);
}

async function route() {
  state.turn += 1;
  const { turn } = state;
  readHash();
  top();
  side();
  if (state.seen !== state.run) document.querySelector("#side .run.main")?.scrollIntoView({ block: "nearest" });
  state.seen = state.run;
  document.title = `${state.run} · Trireme`;
  try {
    await VIEWS.find(([name]) => name === state.view)[2](main, state);
    if (turn === state.turn) Object.assign(main.dataset, { ready: state.view, run: state.run });
  } catch (error) {
    if (turn === state.turn) fill(main, h("div.card.error", { role: "alert" }, error.message));
  }
}

state.again = route;

let looking = false; // a look that takes longer than `EVERY` is not overtaken by the next
async function look() {
  if (looking) return;
  looking = true;
  try {
    const seen = (run) => run && `${run.generation} ${run.state}`;
    const before = state.runs;
    state.runs = await ask("runs");
    const same = (run) => seen(run) === seen(state.runs.find((now) => now.name === run.name));
    const changed = state.view === "runs" ? before.length !== state.runs.length || !before.every(same) : !state.shown.every(same);
    readHash();
    side();
    const listed = state.view === "rollouts" && main.querySelector(".list"); // what one reads stays
    const writing = main.querySelector("input[name=note]");
    if (changed && state.view !== "run" && !listed && !writing) await route();
    else if (changed && listed) main.dispatchEvent(new CustomEvent("news"));
  } catch (error) {
    document.title = `No answer · Trireme`;
  } finally {
    looking = false;
  }
}

function switchTheme() {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("trireme-theme", document.documentElement.dataset.theme); } catch { /* a file may have no storage */ }
  route();
}

function help() {
  const keys = [["1 – 5", "the views"], ["j, k", "next, previous rollout"], ["c, t, g, s", "conversation, tokens, group, through the steps"], ["/", "search"], ["r", "a random rollout"], ["d", "light or dark"], ["Esc", "close, back to the list"]];
  const dialog = document.getElementById("help");
  fill(dialog, h("h2", {}, "Keys"), h("table", {}, keys.map(([name, what]) => h("tr", {}, h("td", {}, h("kbd", {}, name)), h("td", {}, what)))), h("form", { method: "dialog" }, h("button.button", {}, "Close")));
  dialog.showModal();
}

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
  if (event.key === "Escape" && typing) { event.preventDefault(); event.target.blur(); return; } // a search field would empty itself
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key >= "1" && event.key <= String(VIEWS.length)) state.go(VIEWS[event.key - 1][0], {});
  else if (event.key === "?") help();
  else if (event.key === "d") switchTheme();
  else if (event.key === "/" && document.querySelector("main input[type=search]")) document.querySelector("main input[type=search]").focus();
  else if (state.view === "rollouts" && rolloutKey(event.key)) { /* done there */ } else return;
  event.preventDefault();
});
addEventListener("hashchange", route);

state.runs = await ask("runs");
await route();
if (!isReport) setInterval(() => { if (!document.hidden) look(); }, EVERY);
