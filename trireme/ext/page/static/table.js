// Which run was best, and what was different about it? All runs as rows, and any two side by side.
import { ask, isReport, note } from "./api.js";
import { colour } from "./charts.js";
import { ago, clock, empty, fill, h, number, percent } from "./dom.js";
import { badge } from "./states.js";

const best = ({ best: found }) => found && (found.measure === "accuracy" ? percent(found.value) : number(found.value));
const began = (run) => (run.started ? Date.parse(run.started) / 1000 : run.updated);
// Title, what is shown, what is sorted by; `num`: a column of numbers.
const COLUMNS = {
  run: ["Run", (run, state, above) => [h("a", { href: state.href("overview", {}, run.name, []) }, run.name.slice(above)), h("div.faint", {}, badge(run), run.kind), run.error && h("div.sentence", { title: run.error }, run.error.split("\n")[0])], (run) => run.name],
  began: ["Began", (run) => [ago(began(run)), run.commit && h("div.faint.mono", { title: `commit ${run.commit}` }, `${run.commit.slice(0, 8)}${run.commit.endsWith("+") ? "+" : ""}`)], began],
  steps: ["Steps", (run) => `${number(run.step)}${run.total && run.state !== "finished" ? ` of ${number(run.total)}` : ""}`, (run) => run.step, "num"],
  reward: ["Last reward", (run) => (run.reward === null && run.loss !== null ? `loss ${number(run.loss)}` : number(run.reward)), (run) => run.reward, "num"],
  best: ["Best held-out", (run) => (run.best ? [best(run), h("div.faint", {}, `step ${run.best.step}`)] : "–"), (run) => run.best?.value, "num"],
  time: ["Time", (run) => (run.seconds === null ? "–" : clock(run.seconds)), (run) => run.seconds, "num"],
};
// The length of the folders that all names begin with.
function shared(names) {
  const parts = names.map((name) => name.split("/").slice(0, -1));
  let count = 0;
  while (parts.every((one) => one.length > count && one[count] === parts[0][count])) count += 1;
  return names.length > 1 ? parts[0].slice(0, count).reduce((sum, part) => sum + part.length + 1, 0) : 0;
}

const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
const MOST = 3; // settings of a run in its row

// Words beginning with # in notes are tags.
const tagsOf = (run) => [...run.note.matchAll(/(?:^|\s)(#[\p{L}\p{N}_-]+)/gu)].map(([, tag]) => tag);
const said = (run) => [run.name, run.state, run.kind ?? "", run.note, ...Object.entries(run.settings ?? {}).map(([key, value]) => `${key}=${text(value)}`)].join("\n").toLowerCase();
const finds = (wanted) => { const words = wanted.toLowerCase().split(/\s+/); return (run) => { const all = said(run); return words.every((word) => all.includes(word)); }; };

export async function table(main, state) {
  const { turn, query } = state;
  const chosen = [query.a, query.b].filter((name) => state.runs.some((run) => run.name === name));
  const changes = chosen.length === 2 ? await ask("compare", { run: chosen[0], other: chosen[1] }) : null;
  if (turn !== state.turn) return;
  const set = (more) => state.go("runs", { ...query, ...more }, true);
  const sort = COLUMNS[query.sort] ? query.sort : "began";
  const down = (query.down ?? (sort === "began" ? "1" : "")) === "1";
  const known = (run) => { const value = COLUMNS[sort][2](run); return value ?? null; };
  const hidden = state.runs.filter((run) => run.hidden).length;
  const rows = state.runs.filter((run) => query.hidden === "1" || !run.hidden).filter(finds(query.find ?? "")).sort((a, b) => {
    const [x, y] = [known(a), known(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1);
  });
  const above = shared(state.runs.map((run) => run.name));
  const pick = (name) => { const left = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name].slice(-2); set({ a: left[0] ?? "", b: left[1] ?? "" }); };
  const head = ([key, [title, , , kind]]) => h(kind ? `th.${kind}` : "th", { "aria-sort": key === sort ? (down ? "descending" : "ascending") : null },
    h("button.sort", { type: "button", onclick: () => set({ sort: key, down: key === sort ? (down ? "0" : "1") : kind ? "1" : "0" }) }, title, key === sort ? (down ? " ▾" : " ▴") : ""));
  const settings = (run) => {
    const all = Object.entries(run.settings ?? {}).filter(([key]) => key !== "algorithm_type").map(([key, value]) => `${key} ${text(value)}`);
    return h("td.settings", { title: all.join("\n") || null }, all.slice(0, MOST).map((one) => h("div", {}, one)), all.length > MOST && h("div.faint", {}, `and ${all.length - MOST} more`));
  };
  const failed = h("p.error", { role: "alert", hidden: true });
  const save = async (run, words, hide) => {
    try {
      await note(run.name, words, hide);
      Object.assign(run, { note: words, hidden: hide });
      state.again();
    } catch (error) { fill(failed, error.message); failed.hidden = false; }
  };
  const write = (cell, run) => {
    const input = h("input", { type: "text", name: "note", value: run.note, maxlength: 2000, "aria-label": `Note on ${run.name}`, onkeydown: (event) => { if (event.key === "Enter") save(run, input.value.trim(), run.hidden); }, onblur: () => { if (input.value.trim() !== run.note) save(run, input.value.trim(), run.hidden); else state.again(); } });
    fill(cell, input);
    input.focus();
  };
  const noteOf = (run) => {
    const cell = h("div.note");
    return fill(cell, isReport ? run.note : [h(`button.sort${run.note ? "" : ".faint"}`, { type: "button", title: "Write a note; words that begin with # are tags", onclick: () => write(cell, run) }, run.note || "Add a note"), " ", h("button.sort.faint", { type: "button", onclick: () => save(run, run.note, !run.hidden) }, run.hidden ? "Show again" : "Hide")]);
  };
  const words = (query.find ?? "").split(/\s+/).filter(Boolean);
  const tags = [...new Set(state.runs.flatMap(tagsOf))].sort();
  const put = (tag) => set({ find: (words.includes(tag) ? words.filter((word) => word !== tag) : [...words, tag]).join(" ") });
  const caret = document.activeElement?.name === "find" ? document.activeElement.selectionStart : null;
  fill(main, h("div.spaced", {}, failed,
    h("div.card.box", {}, h("div.bar", { style: { "margin-bottom": "8px" } }, h("h2.count", {}, `${rows.length} run${rows.length === 1 ? "" : "s"}`),
      h("input", { type: "search", name: "find", value: query.find ?? "", placeholder: "Filter by name, note, setting, state", "aria-label": "Filter the runs", oninput: (event) => set({ find: event.target.value }), style: { flex: "1 1 180px", "max-width": "320px" } }),
      tags.map((tag) => h("button.button.tag", { type: "button", "aria-pressed": String(words.includes(tag)), onclick: () => put(tag) }, tag)), h("span.grow"),
      hidden > 0 && h("label.quiet", {}, h("input", { type: "checkbox", name: "hidden", checked: query.hidden === "1", onchange: (event) => set({ hidden: event.target.checked ? "1" : "" }) }), ` with the ${hidden} hidden`),
      h("span.quiet", {}, "Tick two to compare their configurations.")),
      h("div.scroll", {}, h("table.runs", {}, h("thead", {}, h("tr", {}, h("th", {}), Object.entries(COLUMNS).map(head), h("th", { title: "Of runs of one kind; the ones that the fewest share come first" }, "Settings that differ"))),
        h("tbody", {}, rows.map((run) => h("tr", { "aria-selected": chosen.includes(run.name) ? "true" : null },
          h("td", {}, h("input", { type: "checkbox", checked: chosen.includes(run.name), "aria-label": `Compare ${run.name}`, onchange: () => pick(run.name) })),
          Object.entries(COLUMNS).map(([key, [, show, , kind]]) => h(kind ? `td.${kind}` : "td", {}, show(run, state, above), key === "run" && noteOf(run))), settings(run))))))),
    changes && difference(chosen, changes)));
  if (caret !== null) { const input = main.querySelector("[name=find]"); input.focus(); input.setSelectionRange(caret, caret); }
}

function difference([one, other], changes) {
  if (!changes.length) return empty("No setting differs", `${one} and ${other} have the same configuration, versions and code.`);
  return h("div.card.box", {}, h("h2", {}, "What differs"), h("div.scroll", {}, h("table.difference", {},
    h("thead", {}, h("tr", {}, h("th", {}, "Setting"), h("th", {}, one), h("th", {}, other))),
    h("tbody", {}, changes.map((change) => h("tr", {}, h("td.mono", {}, change.key), h("td.mono", {}, h("del", {}, text(change.old) ?? "–")), h("td.mono", {}, h("ins", {}, text(change.new) ?? "–"))))))));
}

// The figures of some runs, each with its colour in the charts.
export function figures(runs, state) {
  const above = shared(state.runs.map((run) => run.name));
  const shown = ["run", "steps", "reward", "best", "time"].map((key) => COLUMNS[key]);
  return h("div.card.box.scroll", {}, h("table.runs", {}, h("thead", {}, h("tr", {}, h("th", {}), shown.map(([title, , , kind]) => h(kind ? `th.${kind}` : "th", {}, title)))),
    h("tbody", {}, runs.map((run) => h("tr", {}, h("td", {}, h("i.swatch", { style: { background: colour(state.runs.indexOf(run)) } })), shown.map(([, show, , kind]) => h(kind ? `td.${kind}` : "td", {}, show(run, state, above))))))));
}
