// The panel of the nearest tokens of a token, by cosine.
import { getJson, modelPath } from "./api.js";
import { element, find, onSubmit, readIntegers, short } from "./dom.js";

let model = null;

const nameOf = ({ id, token }) => (token === undefined || token === null ? `${id}` : `${id} ${JSON.stringify(token)}`);

// Prepare the panel for a model of tokens.
export function openNeighbours(description) {
  model = description;
  find("nearest").replaceChildren();
  find("neighbours-words").replaceChildren();
  find("neighbours-error").replaceChildren();
}

onSubmit(find("neighbours-form"), find("neighbours-error"), async () => {
  find("nearest").replaceChildren();
  find("neighbours-words").replaceChildren();
  const [id, count] = ["token", "count"].map((name) => readIntegers(find(name).value, name)[0] ?? "");
  const found = await getJson(`${modelPath(model)}/neighbours?id=${id}&count=${count}`);
  const [{ cosine }] = found.neighbours;
  find("neighbours-words").textContent =
    `Nearest to ${nameOf(found)}: ${nameOf(found.neighbours[0])}, with cosine ${short(cosine)}.`;
  find("nearest").replaceChildren(...found.neighbours.map((neighbour) => {
    const words = short(neighbour.cosine);
    const bar = element("meter", { min: -1, max: 1, value: neighbour.cosine, "aria-label": `cosine ${words}` });
    return element("li", {}, `${nameOf(neighbour)}: ${words} `, bar);
  }));
});
