// What does it say? The list with its filters, and the reader beside it.
import { ask, exportUrl, isReport } from "./api.js";
import { empty, fill, h, number, segments } from "./dom.js";
import { reader } from "./reader.js";

const PAGE = 100;
const SETTLED = 250; // milliseconds for which a search stands before all that fit are counted
const FILTERS = ["kind", "step", "task", "least", "most", "cut", "disagree", "text", "order", "seed", "by"];
const NAMES = { train: "Training", eval: "Held out", failed: "Failed", data: "Data set" };
// What the list holds: groups of rollouts of one task, or single rollouts, which a search is after.
const byGroup = (query, facts) => {
  const kind = query.kind || "train";
  if (kind !== "train" && kind !== "eval") return false;
  if (facts && facts[kind]?.groups === facts[kind]?.count) return false;
  return query.by ? query.by === "group" : kind === "train" && !query.text && !query.task;
};
const askFor = (query, more) => ask(byGroup(query, view?.run === query.run ? view.found.facts : null) ? "groups" : "rollouts", { ...query, kind: query.kind || "train", ...more });
let view = null; // {state, found, rows, list, reader}
const showNew = () => { view.stale = true; view.state.again(); };
document.getElementById("main").addEventListener("news", () => { if (view) fill(view.news, h("button.button", { type: "button", onclick: showNew }, "Show what is new")); });

const filters = (query) => Object.fromEntries(FILTERS.map((name) => [name, query[name] ?? ""]));

export async function rollouts(main, state) {
  const { turn } = state;
  const query = { ...filters(state.query), run: state.run };
  const same = view && !view.stale && view.main === main && main.contains(view.list) && JSON.stringify(query) === JSON.stringify(view.asked);
  if (!same) {
    const asked = performance.now();
    let found = await askFor(query, { limit: PAGE, uncounted: 1 });
    if (found.rows[0]?.rollouts && !byGroup(query, found.facts)) found = await ask("rollouts", { ...query, kind: query.kind || "train", limit: PAGE, uncounted: 1 });
    if (turn !== state.turn) return;
    if (!Object.keys(found.facts).length) {
      fill(main, empty("No rollouts are stored", "A run keeps a copy of what its model said in buffer/. This one has just begun, or was told to keep none (data_processor.experience_pipeline.save_input)."));
      return;
    }
    if (!query.kind && !found.facts.train) return state.go("rollouts", { ...state.query, kind: found.facts.data ? "data" : Object.keys(found.facts)[0] }, true);
    view = { main, state, run: state.run, took: view ? performance.now() - asked : 0, asked: query, found, rows: found.rows, offset: found.rows.length };
    const typing = document.activeElement?.name;
    const caret = document.activeElement?.selectionStart;
    build(main);
    if (typing) {
      const input = main.querySelector(`[name="${typing}"]`);
      input?.focus();
      if (input?.type === "search") input.setSelectionRange(caret, caret);
    }
  }
  view.state = state;
  await open();
  const own = view; // where somebody types on, the next letter's list comes first
  if (own.found.total === null) setTimeout(() => { if (own === view && turn === state.turn) count(own); }, SETTLED);
}

// A search shows its first page before the server has read all rollouts for the number of them.
async function count(own) {
  if (own.found.total !== null || own.counting) return;
  own.counting = true;
  try {
    own.found.total = (await askFor(own.asked, { limit: 0 })).total;
    if (own !== view) return;
    own.count.textContent = counting();
    own.list.querySelector(".further")?.replaceWith(...[furtherItem()].filter(Boolean));
  } catch (error) {
    own.count.textContent = error.message;
  } finally {
    own.counting = false;
  }
}

function build(main) {
  const { found, state } = view;
  view.list = h("div.card.list", { role: "listbox", "aria-label": "Rollouts" });
  view.reader = h("section.card.reader", { "aria-label": "Rollout" });
  view.split = h("div.split", {}, view.list, view.reader);
  view.count = h("span.quiet.count", { "aria-live": "polite" });
  view.news = h("span");
  fill(main, h("div.spaced", {}, bar(found.facts, state), view.split));
  fill(view.reader, h("p.quiet.pad", {}, "Reading the rollout …"));
  listed();
}

function bar(facts, state) {
  const query = state.query;
  const kind = query.kind || "train";
  // of the query as it is then: a typed word may arrive after the next click
  const set = (changes) => state.go("rollouts", { ...state.query, ...changes, eid: "" }, true);
  const steps = facts[kind]?.steps ?? [];
  const grouped = (kind === "train" || kind === "eval") && facts[kind] && facts[kind].groups < facts[kind].count;
  let waiting = null;
  const typed = (name) => (event) => { clearTimeout(waiting); waiting = setTimeout(() => set({ [name]: event.target.value }), Math.min(Math.max(view.took, 40), 300)); };
  const choose = (name, choices, label) => h("select", { name, "aria-label": label, onchange: (event) => set({ [name]: event.target.value, ...(name === "order" && event.target.value === "random" ? { seed: Date.now() % 100000 } : {}) }) },
    choices.map(([value, text]) => h("option", { value, selected: String(value) === (query[name] ?? "") }, text)));
  const kinds = Object.keys(facts);
  return h("div.spaced.filters", { style: { gap: "10px" } },
    h("div.bar", {},
      kinds.length > 1 && segments(kinds.map((name) => [name, `${NAMES[name]} ${facts[name].count.toLocaleString("en")}`]), kind, (value) => set({ kind: value, step: "", task: "", by: "", disagree: "", tab: "" }), "Kind"),
      h("input", { type: "search", name: "text", placeholder: "Search prompts and replies  ( / )", "aria-label": "Search prompts and replies", value: query.text ?? "", oninput: typed("text"), style: { flex: "1", "min-width": "180px" } }),
      choose("order", [["", "Newest"], ["oldest", "Oldest"], ["best", "Best"], ["worst", "Worst"], ["longest", "Longest"], ["random", "Random"]], "Order"),
      choose("step", [["", "All steps"], ...steps.map((step) => [step, `Step ${step}`])], "Step"),
      choose("cut", [["", "Any end"], ["1", "Cut at the limit"], ["0", "Ended itself"]], "End of the reply")),
    h("div.bar", {},
      grouped && segments([["group", "Groups"], ["rollout", "Rollouts"]], byGroup(query, facts) ? "group" : "rollout", (value) => set({ by: value }), "What the list holds"),
      grouped && h("label", { title: "Groups whose rollouts have different rewards: only these have a gradient" }, h("input", { type: "checkbox", name: "disagree", checked: query.disagree === "1", onchange: (event) => set({ disagree: event.target.checked ? "1" : "" }) }), "Groups that disagree"),
      kind !== "data" && h("label", {}, "Reward from", h("input", { type: "number", step: "any", name: "least", value: query.least ?? "", oninput: typed("least") })),
      kind !== "data" && h("label", {}, "to", h("input", { type: "number", step: "any", name: "most", value: query.most ?? "", oninput: typed("most") })),
      query.task && h("button.button", { type: "button", onclick: () => set({ task: "" }) }, `${kind === "data" ? "Row" : "Task"} ${taskName(query.task)}  ×`),
      view.count, view.news, h("span.grow"),
      !isReport && h("span.row", {}, ["jsonl", "parquet"].map((form) => h("a.button", { title: "Export the selected rollouts", href: exportUrl({ ...view.asked, kind }, form), download: true }, form === "jsonl" ? "JSONL" : "Parquet")))));
}

function listed() {
  const { rows } = view;
  fill(view.count, counting());
  if (!rows.length) return void fill(view.list, h("div.empty", {}, h("h2", {}, "None fits"), h("p", {}, "No rollout passes these filters.")));
  fill(view.list, rows.map((row) => (row.rollouts ? groupItem(row) : h("button.item", { type: "button", role: "option", id: `item ${row.eid}`, onclick: () => choose(row) },
    h("span.first", {}, reward(row), h("span", {}, `step ${row.step}`), row.cut && h("span.badge.warn", {}, "cut"), h("span.grow"), h("span.faint", {}, row.kind === "train" ? `rollout ${rolloutOf(row)}` : row.kind === "data" ? `row ${row.task}` : taskName(row.task))),
    row.question && h("span.question", {}, row.question),
    h("span.reply", {}, row.reply || "(nothing)")))),
    furtherItem());
}

// `0:7` is row 7 of the first task set, `1:7` one of the second; other names stay.
export function taskName(task) {
  const [, set, row] = /^(\d+):(\d+)$/.exec(task) ?? [];
  return row === undefined ? task : `row ${row}${set === "0" ? "" : ` of task set ${Number(set) + 1}`}`;
}

export const rolloutOf = (row) => row.eid.slice(row.group.length + 1).split("/")[0];

// A group: its question, and a dot for each rollout, by its reward.
function groupItem(row) {
  const [low, high] = view.found.facts[row.kind]?.rewards ?? [0, 1];
  const share = (value) => (high > low ? (value - low) / (high - low) : Number(value > 0));
  const dot = (one) => h(`button.dot${one.reward === null ? ".none" : share(one.reward) ? "" : ".low"}`, { type: "button", id: `item ${one.eid}`, style: one.reward === null ? {} : { background: `color-mix(in oklab, var(--dot-good) ${Math.round(100 * share(one.reward))}%, var(--dot-bad))` },
    title: `rollout ${one.run}: ${one.reward === null ? "no reward" : `reward ${number(one.reward, 2)}`}${one.cut ? ", cut at its limit" : ""}`, "aria-label": `Rollout ${one.run}, reward ${number(one.reward, 2)}`, onclick: () => choose(one, { tab: view.state.query.tab === "group" ? "" : view.state.query.tab }) });
  return h("div.item.group", { role: "option", "data-group": row.group },
    h("button.title", { type: "button", onclick: () => choose(row.rollouts[0], { tab: "group" }) },
      h("span.first", {}, h("span", {}, `step ${row.step}`), h("span.grow"), h("span.faint", {}, taskName(row.task))),
      h("span.question", {}, row.question || "(no question)")),
    h("div.dots", {}, row.rollouts.map(dot), h("span.grow"), h("span.faint", {}, `mean ${number(row.mean, 2)}`)));
}

function counting() {
  const { found, rows, state } = view;
  const what = state.query.kind === "data" ? "rows" : rows[0]?.rollouts ? "groups" : "rollouts";
  return found.total === null ? `${rows.length} ${what} or more …` : `${found.total.toLocaleString("en")} ${what}`;
}

function furtherItem() {
  const { found, rows } = view;
  const rest = found.total === null ? PAGE : found.total - rows.length;
  if (rest <= 0) return null;
  const text = found.total === null ? `Show ${PAGE} more` : `Show ${Math.min(PAGE, rest)} more of ${rest.toLocaleString("en")}`;
  return h("button.item.further", { type: "button", onclick: further }, h("span.quiet", {}, text));
}

async function further() {
  const own = view;
  const name = (row) => row.eid ?? row.group;
  const known = new Set(own.rows.map(name));
  let [page, fresh] = [[], []];
  do { // rollouts that came since moved the shown ones down: a page may hold only those
    page = (await askFor(own.asked, { offset: own.offset, limit: PAGE })).rows;
    if (own !== view) return;
    own.offset += page.length;
    fresh = page.filter((row) => !known.has(name(row)));
  } while (page.length && !fresh.length);
  own.rows.push(...fresh);
  if (!page.length) own.found.total = own.rows.length;
  listed();
  marked();
}

export function reward(row) {
  if (row.kind === "failed") return h("span.badge.bad", {}, row.failure?.kind ?? "failed");
  const reply = row.pair ?? row.info?.reply;
  if (row.kind === "data") return reply && h(`span.badge.${reply === "chosen" ? "good" : "bad"}`, {}, reply);
  if (row.reward === null || row.reward === undefined) return h("span.badge", {}, "no reward");
  return h(`span.badge.${row.reward > 0 ? "good" : "bad"}`, {}, number(row.reward, 2));
}

const choose = (row, extra = {}) => view.state.go("rollouts", { ...view.state.query, eid: row.eid, ...extra }, true);

function marked() {
  for (const dot of view.list.querySelectorAll(".dot")) dot.classList.toggle("on", dot.id === `item ${view.row?.eid}`);
  for (const item of view.list.querySelectorAll(".item")) {
    const on = item.dataset.group ? item.dataset.group === view.row?.group : item.id === `item ${view.row?.eid}`;
    if (on) item.setAttribute("aria-current", "true"); else item.removeAttribute("aria-current");
    if (on) {
      const above = item.getBoundingClientRect().top - view.list.getBoundingClientRect().top + view.list.scrollTop;
      const below = above + item.offsetHeight;
      if (above < view.list.scrollTop) view.list.scrollTop = above;
      else if (below > view.list.scrollTop + view.list.clientHeight) view.list.scrollTop = below - view.list.clientHeight;
    }
  }
}

async function open() {
  const { state, rows } = view;
  const { turn } = state;
  const wanted = state.query.eid || rows[0]?.eid || rows[0]?.rollouts[0].eid;
  for (const box of [view.split, view.split.parentElement]) box.classList.toggle("reading", Boolean(state.query.eid));
  if (!wanted) { view.row = null; return void fill(view.reader, h("div.empty", {}, h("p", {}, "Choose a rollout."))); }
  const kind = state.query.kind || "train";
  const row = await ask("rollout", { run: state.run, kind, eid: wanted });
  if (turn !== state.turn) return;
  view.row = row;
  marked();
  await reader(view.reader, view.row, {
    run: state.run, tab: state.query.tab || (rows[0]?.rollouts && !state.query.eid ? "group" : "conversation"), text: state.query.text ?? "",
    pick: (tab) => state.go("rollouts", { ...state.query, eid: wanted, tab: tab === "conversation" ? "" : tab }, true),
    jump: (row) => choose(row),
    back: () => state.go("rollouts", { ...state.query, eid: "" }, true),
    whole: (task) => state.go("rollouts", { kind: state.query.kind ?? "", task, order: "oldest" }, true),
  });
}

// A key of the list or the reader; whether it was one.
export function key(name) {
  if (!view?.rows.length) return false;
  const here = view.state.query.eid || view.row?.eid; // which may not have arrived yet
  const at = view.rows.findIndex((row) => (row.rollouts ? row.rollouts.some((one) => one.eid === here) : row.eid === here));
  const tabs = { c: "", t: "tokens", g: "group", s: "steps" };
  if (name === "j" || name === "k") {
    const next = view.rows[Math.min(Math.max(at + (name === "j" ? 1 : -1), 0), view.rows.length - 1)];
    choose(next.rollouts?.[0] ?? next, next.rollouts ? { tab: view.state.query.tab || "group" } : {});
  } else if (name in tabs) choose(view.row, { tab: tabs[name] });
  else if (name === "r") view.state.go("rollouts", { ...view.state.query, order: "random", seed: Date.now() % 100000, eid: "" }, true);
  else if (name === "Escape") view.state.go("rollouts", { ...view.state.query, eid: "" }, true);
  else return false;
  return true;
}
