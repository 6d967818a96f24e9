"""In place of a process that tokenizes ahead: a thread, which answers as it does and starts faster."""

import pickle
from concurrent.futures import ThreadPoolExecutor

from gspmd_lm.data import ahead_process


class Here:
    def __init__(self, work, threads):
        self.answers, self.pool = ahead_process.Answers(pickle.loads(work)), ThreadPoolExecutor(1)
        self.tokens, self.taken_s = 1000, 1.0

    def ask(self, request):
        return self.pool.submit(self.answers.find, pickle.loads(pickle.dumps(request)))

    def stop(self):
        self.pool.shutdown(cancel_futures=True)
