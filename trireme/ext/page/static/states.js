// How a run goes, or how it ended, in a word and in a sentence.
import { isReport } from "./api.js";
import { clock, h } from "./dom.js";

const WORDS = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", killed: "killed" };
const ENDED = {
  stopped: "It was asked to stop. The same command goes on from its last checkpoint.",
  killed: "Its process is gone and has not said why: it was killed, or the machine had no memory left.",
};

export const badge = (run) => WORDS[run.state] && h(`span.state.${run.state}`, {}, WORDS[run.state]);

// Where it is: `step 38 of 400 · left 3:22`; of a run that has finished its steps alone.
export function progress(run) {
  const at = `step ${run.step}${run.total && run.state !== "finished" ? ` of ${run.total}` : ""}`;
  return run.left === null || isReport ? at : `${at} · left ${clock(run.left)}`;
}

// What ended it, where that was not its last step.
export function ending(run) {
  if (run.state !== "failed" && !ENDED[run.state]) return null;
  const [sentence, ...place] = (run.error || ENDED[run.state] || "").split("\n");
  return h(`div.card.error.ended.${run.state}`, { role: "status" }, h("h3", {}, `${run.state[0].toUpperCase()}${run.state.slice(1)} at ${progress(run)}`), h("p", {}, sentence),
    place.length > 0 && h("p.quiet.mono", {}, place.join("\n").trim()), run.state === "failed" && h("p.faint", {}, "The whole traceback is in log/error.log of its folder."));
}
