// Decode streams: over a WebSocket, or step by step over `POST …/embed`, where a key is needed.
import { decodeFloats, embed, hasKey, modelPath, splitVectors } from "./api.js";

// A stream over a WebSocket. The service keeps the offsets.
class SocketStream {
  constructor(socket) {
    this.socket = socket;
  }

  send(message) {
    const { socket } = this;
    return new Promise((resolve, reject) => {
      socket.onmessage = ({ data }) => {
        const answer = JSON.parse(data);
        if (answer.error) reject(new Error(`${answer.error.status} ${answer.error.title}: ${answer.error.detail}`));
        else if (answer.closing) reject(new Error(`The service closed the stream: ${answer.closing}`));
        else resolve(readAnswer(answer));
      };
      socket.onclose = ({ code }) => reject(new Error(`The stream is closed (code ${code}). Open another one.`));
      if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
      else socket.onclose({ code: "none" });
    });
  }

  close() {
    this.socket.close();
  }
}

// A stream of single requests. This page keeps the offsets.
class RequestStream {
  constructor(model, offset) {
    this.model = model;
    this.offset = offset;
  }

  async send({ input_ids: ids, rewind, reorder }) {
    if (ids) {
      // `POST …/embed` refuses empty rows, and a step may have them.
      const fed = ids.flatMap((row, place) => (row.length ? [place] : []));
      if (!fed.length) throw new Error("input_ids: got empty rows alone, expected a token");
      const [given, offset] = [fed.map((row) => ids[row]), fed.map((row) => this.offset[row])];
      const { answer, vectors } = await embed(this.model, { input_ids: given, offset, encoding: "base64" });
      this.offset = this.offset.map((value, row) => (ids[row]?.length ? answer.next_offset[fed.indexOf(row)] : value));
      return { offset: this.offset, shape: answer.shape, vectors };
    }
    if (rewind) {
      const wanted = this.offset.map((_, row) => (rewind.length === 1 ? rewind[0] : rewind[row]));
      const wrong = wanted.findIndex((value, row) => !(value >= 0 && value <= this.offset[row]));
      if (wrong >= 0) throw new Error(`rewind[${wrong}]: got ${wanted[wrong]}, expected 0 to ${this.offset[wrong]}`);
      this.offset = wanted;
    }
    if (reorder) {
      const wrong = reorder.find((row) => !(row in this.offset));
      if (wrong !== undefined) throw new Error(`reorder: got ${wrong}, expected 0 to ${this.offset.length - 1}`);
      this.offset = reorder.map((row) => this.offset[row]);
    }
    return { offset: this.offset, shape: null, vectors: [] };
  }

  close() {}
}

function readAnswer({ next_offset: offset, shape = null, embeddings }) {
  const vectors = embeddings === undefined ? [] : splitVectors(decodeFloats(embeddings), shape.at(-1));
  return { offset, shape, vectors };
}

// Open a stream with one offset for each row.
export async function openStream(model, offset) {
  if (hasKey()) return new RequestStream(model, offset);
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const address = `${scheme}//${location.host}${modelPath(model)}/decode?offset=${JSON.stringify(offset)}`;
  const socket = new WebSocket(address);
  await new Promise((resolve, reject) => {
    socket.onopen = resolve;
    // A browser hides the reason of a refused handshake; a request at these offsets has the same one.
    socket.onclose = () => embed(model, { input_ids: offset.map(() => [0]), offset }).then(
      () => reject(new Error("The stream could not be opened.")), reject);
  });
  socket.onclose = null;
  return new SocketStream(socket);
}
