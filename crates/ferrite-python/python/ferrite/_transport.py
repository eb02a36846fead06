"""An asyncio transport over a native stream, so that redis.asyncio's readers work unchanged.

The stream's eventfd becomes readable when a call that would have waited may continue. The loop
then tries both directions. No thread of the stream ever takes Python's lock.
"""
import asyncio
import collections
import os

CHUNK_BYTES = 64 << 10
# Number of chunks that are received in a row before the event loop runs other callbacks.
CHUNKS_AT_ONCE = 16


class StreamTransport(asyncio.Transport):
    """Sends and receives over `stream`, which nothing else may use unless reading is paused."""

    def __init__(self, loop, stream, protocol):
        super().__init__(extra={"peername": stream.getpeername()})
        self._loop, self._stream, self._protocol = loop, stream, protocol
        self._unsent = collections.deque()
        self._unsent_bytes = 0
        self._high, self._low = 64 << 10, 16 << 10
        self._is_writing_paused = self._is_reading_paused = False
        self._is_at_end = self._is_closed = False
        stream.settimeout(0)
        self._event = stream.fileno()
        loop.add_reader(self._event, self._ready)
        protocol.connection_made(self)
        loop.call_soon(self._receive)

    # ---- reading ----

    def _ready(self):
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            pass
        self._send_unsent()
        self._receive()

    def _receive(self):
        for _ in range(CHUNKS_AT_ONCE):
            if self._is_reading_paused or self._is_at_end or self._is_closed:
                return
            try:
                data = self._stream.recv(CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._finish(error)
                return
            if data:
                self._protocol.data_received(data)
                continue
            self._is_at_end = True
            if not self._protocol.eof_received():
                self.close()
        self._loop.call_soon(self._receive)

    def is_reading(self):
        return not self._is_reading_paused and not self._is_closed

    def pause_reading(self):
        self._is_reading_paused = True

    def resume_reading(self):
        self._is_reading_paused = False
        self._loop.call_soon(self._receive)

    # ---- writing ----

    def write(self, data):
        if self._is_closed or not len(data):
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += self._unsent[-1].nbytes
        self._send_unsent()
        if self._unsent_bytes > self._high and not self._is_writing_paused:
            self._is_writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, pieces):
        pieces = list(pieces)
        if sum(map(len, pieces)) <= CHUNK_BYTES:
            self.write(b"".join(pieces))
        else:  # a large value is sent from its own memory
            for piece in pieces:
                self.write(piece)

    def _send_unsent(self):
        while self._unsent and not self._is_closed:
            try:
                sent = self._stream.send(self._unsent[0])
            except BlockingIOError:
                break
            except OSError as error:
                self._finish(error)
                return
            self._unsent_bytes -= sent
            rest = self._unsent.popleft()[sent:]
            if rest.nbytes:
                self._unsent.appendleft(rest)
        if self._is_writing_paused and self._unsent_bytes <= self._low:
            self._is_writing_paused = False
            self._protocol.resume_writing()

    def set_write_buffer_limits(self, high=None, low=None):
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self):
        return self._unsent_bytes

    def get_write_buffer_limits(self):
        return self._low, self._high

    def can_write_eof(self):
        return False

    # ---- the end ----

    def is_closing(self):
        return self._is_closed

    def close(self):
        """Closes at once and drops unsent bytes: the rest of a command that was cancelled.

        These bytes may be in the caller's own buffer, which the caller may change from now on. If
        they were sent, the server could store a value of old and new bytes.
        """
        self._finish(None)

    abort = close

    def _finish(self, error):
        if self._is_closed:
            return
        self._is_closed = True
        self._unsent.clear()
        self._loop.remove_reader(self._event)
        self._stream.close()
        self._loop.call_soon(self._protocol.connection_lost, error)

    def set_protocol(self, protocol):
        self._protocol = protocol

    def get_protocol(self):
        return self._protocol
