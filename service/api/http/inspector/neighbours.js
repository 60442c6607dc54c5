// The panel of the nearest tokens of a token, by cosine.
import { getJson, modelPath } from "./api.js";
import { bar, find, onSubmit, restart, short, tableRow } from "./dom.js";

const FIRST_WORD = 2000; // vocabularies begin with special tokens, bytes and single characters
const place = find("neighbours-error");
let model = null;

const nameOf = ({ id, token }) => (token === null ? `${id}` : `${id} ${JSON.stringify(token)}`);

function clear() {
  find("nearest").replaceChildren();
  find("neighbours-words").replaceChildren();
}

// Prepare the panel for a model of tokens. Return whether the model has a lookup of its own.
export function openNeighbours(description) {
  model = description;
  find("token").value = Math.min(FIRST_WORD, model.manifest.vocab_size - 1);
  clear();
  restart(place);
  return model.manifest.token_embeddings !== null;
}

onSubmit(find("neighbours-form"), place, async (isOld) => {
  clear();
  const [id, count] = ["token", "count"].map((name) => find(name).valueAsNumber);
  const found = await getJson(`${modelPath(model)}/neighbours?id=${id}&count=${count}`);
  if (isOld()) return;
  const [nearest] = found.neighbours;
  find("neighbours-words").textContent =
    `Nearest to ${nameOf(found)}: ${nameOf(nearest)}, with cosine ${short(nearest.cosine)}.`;
  const spelled = found.neighbours.some(({ token }) => token !== null);
  find("spelling").hidden = !spelled;
  find("nearest").replaceChildren(...found.neighbours.map(({ id: other, token, cosine }) => {
    const spelling = token === null ? "" : JSON.stringify(token);
    return tableRow(String(other), ...(spelled ? [spelling] : []), short(cosine), bar(cosine));
  }));
});
