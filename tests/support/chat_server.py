"""A server with OpenAI's chat API whose answers and failures a test sets. Uses the standard library only."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

HANGS, HANGS_UP = "hangs", "hangs up"


@dataclass(frozen=True)
class Reply:
    """`body`: text and bytes are sent unchanged, everything else as JSON."""

    status: int = 200
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


@dataclass(frozen=True)
class EvalRequest:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def completion(text: str | None, *, finish: str = "stop", tokens: tuple[int, int] | None = (7, 3)) -> dict[str, Any]:
    usage = tokens and {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def says(text: str | None, **others: Any) -> Reply:
    return Reply(body=completion(text, **others))


def refuses(status: int, message: str, code: str | None = None, **headers: str) -> Reply:
    error = {"message": message, "type": "error", "param": None, "code": code}
    return Reply(status, {"error": error}, {name.replace("_", "-"): value for name, value in headers.items()})


def busy(status: int = 429) -> Reply:
    return refuses(status, "too much to do", retry_after_ms="1")


Answer = Reply | str
"""A reply, HANGS or HANGS_UP."""


class ChatServer:
    """Answers chats by `script` as long as it lasts, then by `answer`. It greets whoever asks `1 + 1 =`, so that
    engines start; `greeting` and `listing` change that."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer] | Answer = says("hello"), *script: Answer) -> None:  # noqa: B008
        self.answer = answer if callable(answer) else lambda body: answer
        self.script = list(script)
        self.greeting: Answer = says("2")
        self.listing: Answer = Reply(body={"object": "list", "data": [{"id": "m", "owned_by": "somebody"}]})
        self.asked: list[EvalRequest] = []
        self.in_flight = self.most = 0
        self._lock, self._closing = threading.Lock(), threading.Event()
        handler = type("Handler", (_Handler,), {"chat": self})
        self._http = type("Http", (ThreadingHTTPServer,), {"request_queue_size": 256})(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"

    def __enter__(self) -> "ChatServer":
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reply_to(self, asked: EvalRequest) -> Answer:
        if asked.path.endswith("/models"):
            return self.listing
        if not asked.path.endswith("/chat/completions"):
            return Reply(404, {"detail": "Not Found"})
        if asked.body["messages"] == [{"role": "user", "content": "1 + 1 ="}]:
            return self.greeting
        with self._lock:
            self.asked.append(asked)
            given = self.script.pop(0) if self.script else None
        return given if given is not None else self.answer(asked.body)

    def count(self, change: int) -> None:
        with self._lock:
            self.in_flight += change
            self.most = max(self.most, self.in_flight)

    def hang(self) -> None:
        self._closing.wait()


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.chat.count(1)
        try:
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = self.chat.reply_to(EvalRequest(self.path, headers, body))
            if reply == HANGS:
                self.chat.hang()
            if not isinstance(reply, Reply):
                self.close_connection = True
                return
            time.sleep(reply.after_s)
        finally:
            self.chat.count(-1)
        is_text = isinstance(reply.body, str)
        content = reply.body.encode() if is_text else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"content-type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass
