// The pictures of a rollout, where its run has stored them; the oldest may be gone.
import { isReport } from "./api.js";
import { h } from "./dom.js";

export function pictures(run, digests) {
  if (isReport || !digests?.length) return null;
  return h("div.pictures", {}, digests.map((digest, place) => h("img", { src: `/api/picture?${new URLSearchParams({ run, digest })}`, alt: `picture ${place + 1} of the prompt`, loading: "lazy", onerror: (event) => event.target.remove() })));
}
