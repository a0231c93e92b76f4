"""Send each request to the vLLM server that has the most of its prompt cached, by KV events of pages and states.

vllm serve MODEL --port 8001 --kv-events-config \
    '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5551"}'  # another with 8002 and 5552
python examples/router.py 8000 http://localhost:8001=tcp://localhost:5551 http://localhost:8002=tcp://localhost:5552
"""

import json
import shutil
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from urllib.request import HTTPHandler, OpenerDirector, Request

import msgspec
import zmq

BLOCK, PAGES, STATES = 64, 0, 1  # tokens of a KV block; groups in events
LOCK = threading.Lock()
OPENER = OpenerDirector()
OPENER.add_handler(HTTPHandler())  # it passes errors of servers on


class Server:
    def __init__(self, url, endpoint):
        self.url, self.work, self.total = url, 0, 0  # tokens to compute for requests under way, and for all
        self.held, self.keys, self.coming = Counter(), {None: 0}, Counter()
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe("")
        threading.Thread(target=self.follow, daemon=True).start()

    def follow(self):
        expected = 0
        while True:
            _, number, payload = self.socket.recv_multipart()
            if int.from_bytes(number, "big") != expected:  # events were lost: begin anew
                self.held.clear()
            expected = int.from_bytes(number, "big") + 1
            for event in msgspec.msgpack.decode(payload)[1]:
                self.note(event)

    def note(self, event):
        """Count the copies of each block: each copy is told of and withdrawn. Name a block by all tokens up to it."""
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            gone = [(event["group_idx"], self.keys.get(name)) for name in event["block_hashes"]]
            self.held.subtract(block for block in gone if self.held[block] > 0)
        else:
            key = self.keys.get(event["parent_block_hash"])
            for i, name in enumerate(event["block_hashes"]):
                extra = (event.get("extra_keys") or {i: None})[i]  # salts, adapters, images
                key = hash((key, *event["token_ids"][i * BLOCK : (i + 1) * BLOCK], *map(repr, extra or ())))
                self.keys[name] = key
                self.held[event["group_idx"], key] += 1

    def look(self, keys, size):
        """Return the hit, up to the deepest state that no missing page precedes, and the tokens to compute."""
        hit = 0
        for depth, key in enumerate(keys, 1):
            if not self.held[PAGES, key]:
                break
            hit = depth * BLOCK if self.held[STATES, key] else hit
        return hit, size - max(hit, BLOCK * sum(self.coming[key] > 0 for key in keys))


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"]))
        asked = {name: each for name, each in json.loads(text).items() if name in ("model", "prompt", "messages")}
        tokens = json.load(post(SERVERS[0].url + "/tokenize", json.dumps(asked).encode()))["tokens"]
        blocks = (tokens[start : start + BLOCK] for start in range(0, len(tokens) - BLOCK, BLOCK))
        keys = [*accumulate(blocks, lambda key, block: hash((key, *block)), initial=0)][1:]
        with LOCK:
            found = [(server, *server.look(keys, len(tokens))) for server in SERVERS]
            server, hit, own = min(found, key=lambda each: (each[2] + each[0].work, each[0].total))
            server.work, server.total = server.work + own, server.total + own
            server.coming.update(keys)
        answer = post(server.url + self.path, text)
        with LOCK:
            server.work -= own
            server.coming.subtract(keys)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"])
        self.send_header("Expected-Hit", hit)
        self.end_headers()
        shutil.copyfileobj(answer, self.wfile)


def post(url, text):
    return OPENER.open(Request(url, text, {"Content-Type": "application/json"}))


if __name__ == "__main__":
    SERVERS = [Server(*each.split("=")) for each in sys.argv[2:]]
    ThreadingHTTPServer.request_queue_size = 512
    ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
