// What was it? Command, seed, versions, configuration, and what changed at a resume.
import { ask } from "./api.js";
import { empty, fill, h, percent, seconds } from "./dom.js";
import { badge, ending, progress } from "./states.js";

const MODES = { both: "explores and trains", train: "trains on data that are there", explore: "explores; another command trains", bench: "measures checkpoints", serve: "serves rollouts" };

export async function about(main, state) {
  const { turn } = state;
  const { starts, stage, summary } = await ask("about", { run: state.run });
  if (turn !== state.turn) return;
  if (!starts.length) return void fill(main, empty("No start is recorded", "This folder has no run/starts.json: it was made by an older version, or by another program."));
  const info = state.runs.find((run) => run.name === state.run);
  const now = starts.at(-1);
  const measured = [["before", summary?.accuracy_before], ["after SFT", summary?.accuracy_sft], ["after RL", summary?.accuracy_rl]].filter(([, value]) => value !== undefined);
  const pairs = (rows) => h("table.pairs", {}, h("tbody", {}, rows.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)))));
  const lines = h("input", { type: "search", placeholder: "Filter keys", oninput: () => show() });
  const config = h("pre.config", { tabindex: 0 });
  const show = () => { config.textContent = now.config_text.split("\n").filter((line) => line.toLowerCase().includes(lines.value.toLowerCase())).join("\n"); };
  show();
  fill(main, h("div.spaced", {},
    ending(info),
    h("div.card.box", {}, h("h2", {}, "The run"), pairs([
      ["State", h("span", {}, badge(info), progress(info))],
      ["Folder", h("span.mono", {}, info.folder)],
      ["Command", h("code", {}, now.command.map((word, at) => (at ? word : word.split("/").at(-1))).join(" "))],
      ["Working folder", h("span.mono", {}, `${now.folder} on ${now.host}`)],
      ["Began", `${starts[0].time}${starts.length > 1 ? `, started ${starts.length} times` : ""}`],
      ["Mode", MODES[now.mode] ? `${now.mode}: ${MODES[now.mode]}` : now.mode], ["Seed", String(now.seed)],
      ["Model", h("span.mono", {}, now.model?.path ?? "")],
      ["Code", h("span.mono", {}, now.code?.trireme ?? "")],
      stage && ["Took", seconds(stage.seconds)],
      stage?.model_dir && ["Trained model", h("span.mono", {}, stage.model_dir)],
      measured.length > 0 && ["Held-out accuracy, all stages", measured.map(([name, value]) => `${name} ${percent(value)}`).join(", ")],
    ].filter(Boolean))),
    starts.length > 1 && h("div.card.box", {}, h("h2", {}, "What changed at a resume"), starts.slice(1).map((start, at) => h("div", { style: { "margin-bottom": "12px" } },
      h("p.quiet", {}, `Start ${at + 2}, ${start.time}${start.resumed_from === null || start.resumed_from === undefined ? "" : `, went on from step ${start.resumed_from}`}`),
      start.changes.length ? h("div.scroll", {}, h("table", {}, h("tbody", {}, start.changes.map((change) => h("tr", {}, h("td.mono", {}, change.key), h("td", {}, h("del", {}, JSON.stringify(change.old))), h("td", {}, h("ins", {}, JSON.stringify(change.new)))))))) : h("p", {}, "Nothing.")))),
    h("div.card.box", {}, h("h2", {}, "Data"), Object.keys(now.data ?? {}).length ? h("div.scroll", {}, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Key"), h("th", {}, "Path"), h("th.num", {}, "Rows"))), h("tbody", {}, Object.entries(now.data).map(([key, set]) => h("tr", {}, h("td.mono", {}, key.replace("buffer.", "")), h("td.mono", {}, set.path), h("td.num", {}, set.rows?.toLocaleString("en") ?? "–")))))) : h("p.quiet", {}, "None is named.")),
    h("div.card.box", {}, h("h2", {}, "Versions"), pairs(Object.entries(now.versions ?? {}))),
    h("div.card.box", {}, h("div.row", { style: { "margin-bottom": "8px" } }, h("h2.grow", {}, "Configuration"), lines), config)));
}
