// One rollout: its conversation, its tokens, its group, and the same task through the steps.
import { ask } from "./api.js";
import { empty, fill, h, number, segments } from "./dom.js";
import { reward, rolloutOf, taskName } from "./rollouts.js";
import { pictures } from "./pictures.js";
import { tokens } from "./tokens.js";

const TABS = {
  train: [["conversation", "Conversation"], ["tokens", "Tokens"], ["group", "Group"], ["steps", "Through the steps"]],
  failed: [["conversation", "Conversation"]],
  data: [["conversation", "Text"], ["tokens", "Tokens"], ["steps", "Through the epochs"]],
  pair: [["conversation", "Text"], ["tokens", "Tokens"], ["group", "Pair"], ["steps", "Through the epochs"]],
};

const titleOf = (row) => (row.kind === "data" ? `Row ${row.task}, step ${row.step}` : row.kind === "eval" ? `Held-out task ${row.task}, step ${row.step}` : `Step ${row.step}, rollout ${rolloutOf(row)}`);

export async function reader(element, row, given) {
  const body = h("div.body");
  const facts = [["id", row.eid], [row.kind === "data" ? "row" : "task", taskName(row.task)], ["tokens", row.response_length], ["trained", row.kind === "data" ? row.trained_tokens : null], ["ended by", row.stop_reason], ["weight version", row.model_version],
    ...Object.entries(row.metrics ?? {}).map(([name, value]) => [name, number(value)])].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const tabs = TABS[row.info?.reply && row.kind === "data" ? "pair" : row.kind] ?? TABS.train;
  const tab = tabs.some(([name]) => name === given.tab) ? given.tab : "conversation";
  fill(element,
    h("div.headline", {},
      h("div.row", {}, h("button.button.back", { type: "button", onclick: given.back }, "Back"), h("h2", {}, titleOf(row)), reward(row), row.cut && h("span.badge.warn", {}, "cut at its limit"), h("span.grow"), segments(tabs, tab, given.pick, "What is shown")),
      h("div.facts", {}, facts.map(([name, value]) => h("span", {}, `${name} `, h("b", {}, String(value)))))),
    body);
  try {
    await { conversation, tokens, group, steps }[tab](body, row, given);
  } catch (error) {
    fill(body, h("div.error", { role: "alert" }, error.message));
  }
}

function highlighted(text, wanted) {
  if (!wanted) return [text];
  const out = [];
  const [low, find] = [text.toLowerCase(), wanted.toLowerCase()];
  let from = 0;
  for (let at = low.indexOf(find); at >= 0; at = low.indexOf(find, from)) {
    out.push(text.slice(from, at), h("mark", {}, text.slice(at, at + find.length)));
    from = at + find.length;
  }
  return [...out, text.slice(from)];
}

const NAMES = { system: "System", user: "User", assistant: "Model", tool: "Tool", developer: "Developer" };

// Messages as they were recorded; without a record the prompt as the model read it, and the reply.
export function turnsOf(row) {
  if (row.messages?.length) return row.messages;
  const out = row.prompt ? [{ role: "user", content: row.prompt, raw: true }] : [];
  return row.response ? [...out, { role: "assistant", content: row.response }] : out;
}

const textOf = (content) => (typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? `[${part.type}]`).join("\n"));

// The right answer and the other columns of the task's row; null for a run that recorded neither.
function truthOf({ info }) {
  const columns = [["Right answer", info?.truth], ...Object.entries(info?.row ?? {})].filter(([, value]) => value !== null && value !== undefined);
  if (!columns.length) return null;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));
  return h("aside.truth", { "aria-label": "The task's row" }, columns.map(([name, value], place) =>
    h("div", {}, h(place || info.truth === undefined ? "div.who.mono" : "div.who", {}, name), h("div.said", { tabindex: text(value).length > 300 ? 0 : null }, text(value)))));
}

// A view with the task's row at its side.
const withTruth = (row, ...shown) => { const truth = truthOf(row); return truth ? h("div.with-truth", {}, h("div", {}, shown), truth) : h("div", {}, shown); };

const asked = (row, run) => withTruth(row, h("div.turn.user", {}, pictures(run, row.pictures), h("div.said", {}, turnsOf(row).filter((turn) => turn.role !== "assistant").map((turn) => textOf(turn.content)).slice(0, 2).join("\n\n"))));

function conversation(body, row, { text, run }) {
  const turns = turnsOf(row);
  const { truth, row: columns, ...more } = row.info ?? {};
  const digestsOf = (content) => (Array.isArray(content) ? content.filter((part) => part.type === "image").map((part) => String(part.image).replace("sha256:", "")) : []);
  fill(body, withTruth(row,
    row.failure && h("div.error.card", { style: { "margin-bottom": "16px" } }, h("h3", {}, `${row.failure.what} failed`), h("p", {}, row.failure.message), row.failure.place && h("p.quiet.mono", {}, row.failure.place), row.failure.trace && h("details", {}, h("summary", {}, "Traceback"), h("pre", { style: { overflow: "auto" } }, row.failure.trace))),
    row.tools?.length && h("details", { style: { "margin-bottom": "14px" } }, h("summary", {}, `${row.tools.length} tools`), h("pre.config", {}, JSON.stringify(row.tools, null, 2))),
    turns.map((turn) => {
      const role = NAMES[turn.role] ? turn.role : "user";
      const said = textOf(turn.content);
      return h(`div.turn.${role}`, {},
        h("div.who", {}, turn.raw ? "Prompt, as the model read it" : `${NAMES[turn.role] ?? turn.role}${turn.name ? ` · ${turn.name}` : ""}`),
        turn.reasoning_content && h("div.call.quiet", {}, turn.reasoning_content),
        pictures(run, turn.raw ? row.pictures : digestsOf(turn.content)),
        said && h("div.said", {}, highlighted(said, text)),
        (turn.tool_calls ?? []).map((call) => h("div.call", {}, `${call.function?.name ?? "call"}(${typeof call.function?.arguments === "string" ? call.function.arguments : JSON.stringify(call.function?.arguments ?? {})})`)));
    }),
    !turns.length && !row.failure && h("p.quiet", {}, "Nothing was said."),
    Object.keys(more).length > 0 && h("details", {}, h("summary.quiet", {}, "What else was recorded"), h("pre.config", {}, JSON.stringify(more, null, 2)))));
}

const replyOf = (row) => row.response ?? "";

function answers(rows, row, jump, label) {
  return h("div.answers", {}, rows.map((one) => h(`div.card.answer${one.eid === row.eid ? ".here" : ""}`, {},
    h("div.row", {}, reward(one), one.cut && h("span.badge.warn", {}, "cut"), h("span.quiet", {}, label(one)), h("span.grow"), one.eid !== row.eid && h("button.button.plain", { type: "button", onclick: () => jump(one) }, "Open")),
    h("div.said", {}, replyOf(one) || "(nothing)"))));
}

async function group(body, row, { run, jump }) {
  const { rows, total } = await ask("rollouts", { run, kind: row.kind, group: row.group, order: "oldest", whole: 1, limit: 200 });
  if (row.kind === "data") return fill(body, h("div.spaced", {}, asked(row, run), answers(rows, row, jump, () => "")));
  const rewards = rows.map((one) => one.reward).filter((value) => value !== null && value !== undefined);
  const mean = rewards.reduce((sum, value) => sum + value, 0) / Math.max(rewards.length, 1);
  const std = Math.sqrt(rewards.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(rewards.length, 1));
  fill(body, h("div.spaced", {},
    h("p.quiet", {}, `${total} answers to the same task in step ${row.step}. Mean reward ${number(mean)}, standard deviation ${number(std)}${rewards.length > 1 && std === 0 ? ": no gradient comes from this group" : ""}.`),
    asked(row, run),
    answers(rows, row, jump, (one) => `rollout ${rolloutOf(one)}`)));
}

async function steps(body, row, { run, jump, whole }) {
  const { rows, total } = await ask("rollouts", { run, kind: row.kind, task: row.task, order: "oldest", whole: 1, limit: 200 });
  const seen = new Set(rows.map((one) => one.step));
  if (seen.size < 2) {
    const why = row.kind === "data" ? "This row was trained in one step so far." : row.kind === "eval" ? "This task was evaluated once so far." : "This task was tried in one step only. Held-out tasks are tried at every evaluation: choose “Held out” above.";
    fill(body, empty("One step only", why));
    return;
  }
  fill(body, h("div.spaced", {},
    h("div.row", {}, h("p.quiet.grow", {}, row.kind === "data" ? `Row ${row.task} was trained in ${seen.size} steps.` : `Task ${taskName(row.task)}: ${total} answers in ${seen.size} steps.`), h("button.button", { type: "button", onclick: () => whole(row.task) }, "As a list")),
    asked(row, run),
    answers(rows, row, jump, (one) => `step ${one.step}`)));
}
