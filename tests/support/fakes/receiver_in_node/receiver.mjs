// A webhook receiver as a user would write it, with the npm package `standardwebhooks`. Prints its port, then serves:
//   PUT  /secret/<name>   the secret of the hook <name>, as text
//   PUT  /mode/<name>     answer | silence: whether the hook answers
//   POST /hook/<name>     a delivery: it is verified, recorded and answered with 204 (401 if it is not genuine)
//   GET  /received        all deliveries, in order
//   POST /verify          [{secret, headers, payload (base64)}] -> [true | false]
import http from "node:http";
import { Webhook } from "standardwebhooks";

const secrets = new Map();
const modes = new Map();
const received = [];

function isGenuine(secret, payload, headers) {
  try {
    new Webhook(secret).verify(payload, headers);
    return true;
  } catch {
    return false;
  }
}

async function whole(request) {
  const blocks = [];
  for await (const block of request) blocks.push(block);
  return Buffer.concat(blocks);
}

async function serve(request, response) {
  const body = await whole(request);
  const [, kind, name] = request.url.split("/");
  if (request.method === "PUT") {
    (kind === "secret" ? secrets : modes).set(name, body.toString());
    response.writeHead(204).end();
  } else if (kind === "received") {
    response.end(JSON.stringify(received));
  } else if (kind === "verify") {
    const cases = JSON.parse(body).map((one) =>
      isGenuine(one.secret, Buffer.from(one.payload, "base64").toString("latin1"), one.headers));
    response.end(JSON.stringify(cases));
  } else {
    const genuine = secrets.has(name) && isGenuine(secrets.get(name), body.toString(), request.headers);
    const silent = modes.get(name) === "silence";
    received.push({ name, genuine, silent, headers: request.headers, payload: JSON.parse(body) });
    if (!silent) response.writeHead(genuine ? 204 : 401).end();
  }
}

const server = http.createServer((request, response) => {
  serve(request, response).catch((error) => response.writeHead(500).end(String(error)));
});
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
