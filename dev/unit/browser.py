"""Drives a page in a headless Chromium by its DevTools protocol over two pipes, with Python's library alone."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser():
    """Returns the path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """with Page(URL) as page: page.evaluate("document.title")"""

    def __init__(self, url, width=1400, height=1000):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # The browser reads commands at descriptor 3 and answers at 4.
        reads, self.to = os.pipe()
        self.come, writes = os.pipe()
        command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self.profile.name}"]
        command += [f"--window-size={width},{height}", "about:blank"]
        placed = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", *command]
        self.process = subprocess.Popen(
            placed, pass_fds=(reads, writes), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        self.number, self.buffer, self.session, self.errors = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=url)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.come)
        self.profile.cleanup()

    def message(self):
        while b"\0" not in self.buffer:
            block = os.read(self.come, 1 << 16)
            if not block:
                raise RuntimeError("the browser has gone")
            self.buffer += block
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def call(self, method, **parameters):
        self.number += 1
        command = {"id": self.number, "method": method, "params": parameters}
        command |= {"sessionId": self.session} if self.session else {}
        os.write(self.to, json.dumps(command).encode() + b"\0")
        while True:
            answer = self.message()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"])[:600])
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression):
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait(self, expression, seconds=30):
        """Waits until the expression is true. Returns its value."""
        until = time.monotonic() + seconds
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            assert time.monotonic() < until, f"waited in vain for {expression}; {self.errors}"
            time.sleep(0.1)

    def screenshot(self):
        """Returns the PNG of what is in sight."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
