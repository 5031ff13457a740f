"""Train a small decoder on bytes of text with its attention spread over ranks.

    torchrun --standalone --nproc-per-node 4 launch/train.py --attention mesh --tile 2x2 --seq-len 8192
    launch/local.sh 4 --attention ring --data ~/books
    launch/local.sh 1 --attention single --seq-len 1024

The three kinds of attention see the same batches, start from the same weights and differ by rounding only.
With a GPU for every rank of the machine it runs on NCCL, otherwise on gloo and the CPU.
"""

import gc
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

import meshattn as ma
from data import Corpus, batch, documents, open_corpus
from model import Decoder
from options import Options, choose_tile, parse
from ranks import Place, agree, choose_device, joined
from steps import Refused, compute_gradients, make_attention, make_optimizer, warmed_up

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None


@dataclass(frozen=True)
class Record:
    """One line of the log. Seconds and bytes (sent by attention) are those of the rank that has most."""

    step: int
    loss: float
    tokens: int
    seconds: float
    bytes_forward: int
    bytes_backward: int
    gradient_norm: float
    lr: float
    kernel: str


class Progress:
    """A bar on a terminal, a line now and then elsewhere; silent on every rank but the first."""

    def __init__(self, total: int, *, speaks: bool) -> None:
        self.total = total
        self.speaks = speaks
        self.bar = tqdm(total=total, unit="step") if speaks and tqdm and sys.stderr.isatty() else None

    def show(self, record: Record) -> None:
        done = record.step + 1
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{record.loss:.4f}", refresh=False)
            self.bar.update()
        elif self.speaks and (done % max(1, self.total // 10) == 0 or done in (1, self.total)):
            print(f"step {done}/{self.total}  loss {record.loss:.4f}  {record.seconds:.2f} s", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


class Trainer:
    """Model, optimizer and mesh of one rank; `step` runs one step on all of them together."""

    def __init__(self, options: Options, place: Place, tile: str, corpus: Corpus, kernel: str) -> None:
        self.options = options
        self.kernel = kernel
        self.device = place.device
        self.corpus = corpus
        self.mesh = ma.init_attention_mesh(
            tile=tile, heads=options.head_axis, transport=options.transport, timeout=options.timeout
        )
        self.whole = self.mesh.sequence(options.seq_len, layout=options.layout)
        torch.manual_seed(options.seed)  # from which dropout draws
        self.model = Decoder(options.model, seed=options.seed).to(self.device)
        if options.dtype == "float64":
            self.model.double()
        self.optimizer = make_optimizer(self.model, lr=options.lr, weight_decay=options.weight_decay)

    def step(self, step: int) -> Record:
        options = self.options
        began = time.perf_counter()
        self.mesh.reset_traffic()
        draw = {"seed": options.seed, "step": step, "seq_len": options.seq_len}
        seq, borders = self.whole, []
        if options.documents:
            borders = documents(**draw, mean=options.documents)
            seq = self.mesh.sequence(options.seq_len, layout=options.layout, cu_seqlens=borders)
        ids = batch(self.corpus, **draw, batch_size=options.batch_size, borders=borders)
        scores = {"softcap": options.softcap, "dropout_p": options.dropout, "kernel": self.kernel}
        scores["deterministic"] = options.kernel is None  # who names a kernel takes it as it is
        attention = make_attention(options.attention, seq, options.window, **scores)
        result = compute_gradients(self.model, ids.to(self.device), seq, attention, options.autocast)
        # All ranks have the same gradients: all clip alike, and weights stay equal without being sent.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip)
        lr = warmed_up(options.lr, step, options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds, forward, backward = self.largest(time.perf_counter() - began)
        return Record(
            step=step,
            loss=result.loss,
            tokens=result.tokens,
            seconds=seconds,
            bytes_forward=int(forward),
            bytes_backward=int(backward),
            gradient_norm=float(norm),
            lr=lr,
            kernel=self.kernel,
        )

    def largest(self, seconds: float) -> list[float]:
        """[seconds, bytes sent forward, backward] since the last reset, each of the rank that has most."""
        sent = {"forward": 0, "backward": 0}
        for record in self.mesh.traffic():
            sent[record.phase] += record.sent_bytes
        values = torch.tensor([seconds, *sent.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values.tolist()

    def describe(self) -> str:
        weights = sum(weight.numel() for weight in self.model.parameters())
        text = f"{self.corpus.size:,} bytes of text in {len(self.corpus.files):,} files"
        return (
            f"{self.mesh.describe()}\nkernel {self.kernel}, {self.options.dtype}\n{text}; {weights:,} weights"
        )


def open_log(path: Path | None, place: Place) -> TextIO | None:
    """The log, on the first rank; raises ValueError if it cannot be written."""
    if path is None or not place.leads:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("w")
    except OSError as error:
        raise ValueError(f"--log-file {path}: {error.strerror}") from error


def run(options: Options, place: Place) -> None:
    with ExitStack() as stack:
        problem, facts, kernel = None, "", ""
        log = None
        try:
            tile = choose_tile(options, place.ranks)
            kernel = ma.kernel_for(
                place.device,
                options.torch_dtype,
                options.model.head_dim,
                softcap=options.softcap,
                dropout_p=options.dropout,
                kernel=options.kernel,
            )
            corpus = open_corpus(options.data, need=options.seq_len)
            facts = f"{corpus.size} bytes of text, fingerprint {corpus.fingerprint}"
            log = open_log(options.log_file, place)
        except ValueError as error:
            problem = str(error)
        agree(problem, facts)
        if log is not None:
            stack.enter_context(log)
        try:
            trainer = Trainer(options, place, tile, corpus, kernel)
        except ValueError as error:  # a transport that cannot serve here, which all ranks find together
            agree(str(error), "")
            raise
        if place.leads:
            print(
                f"{place.ranks} rank{'s' if place.ranks > 1 else ''}, {place.why}\n{trainer.describe()}",
                flush=True,
            )
        progress = Progress(options.steps, speaks=place.leads)
        stack.callback(progress.close)
        for step in range(options.steps):
            try:
                record = trainer.step(step)
            except Refused as error:
                if step == 0:  # a kernel that does not take the mask, for example
                    agree(str(error), "")
                raise
            if log is not None:
                print(json.dumps(asdict(record)), file=log, flush=True)
            progress.show(record)
        trainer.mesh.close()


def main() -> None:
    environment = os.environ
    options = parse(speaks=environment.get("RANK", "0") == "0")
    try:
        device, why = choose_device(
            options.device,
            int(environment.get("LOCAL_RANK", "0")),
            int(environment.get("LOCAL_WORLD_SIZE", "1")),
        )
    except ValueError as error:
        # Each machine speaks for itself here: there is no group yet in which to agree.
        if environment.get("LOCAL_RANK", "0") == "0":
            print(f"train.py: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
    code: int | str | None = 0
    try:
        with joined(device, why, options.timeout) as place:
            run(options, place)
    except SystemExit as stop:
        code = stop.code
    gc.collect()  # frames of an error, say, that refer to process groups, whose threads have to end first
    raise SystemExit(code)


if __name__ == "__main__":
    main()
