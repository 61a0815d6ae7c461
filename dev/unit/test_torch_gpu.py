"""Cases that need a GPU, or two, or find more on one. test_torch.py, whose helpers these use, runs them."""
import contextlib
import gc
import threading

from test_torch import DEVICES, make, model_of, nibble_optim, raises, same, torch, train
from test_torch_laws import Run


def test_torch_cuda_graph_of_many_tensors():
    """More addresses than one launch brings into a graph."""
    if len(DEVICES) < 2:
        return "skipped: no GPU"
    runs = []
    for captured in (False, True):
        params = [torch.nn.Parameter(torch.sin(t + torch.arange(30.0, device="cuda"))) for t in range(300)]
        optimizer, graph = nibble_optim.Optimizer(params, preset="adamw8", capturable=True), torch.cuda.CUDAGraph()
        for t, p in enumerate(params):
            p.grad = torch.cos(t + torch.arange(30.0, device="cuda"))
        optimizer.step()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(3):
            graph.replay() if captured else optimizer.step()
        runs.append(params)
    assert all(map(torch.equal, *runs))


def test_torch_goes_on_after_missing_memory():
    if len(DEVICES) < 2:
        return "skipped: no GPU"
    models = [model_of("cuda") for _ in range(2)]
    optimizers = [make(model, preset="adamw8") for model in models]
    for model, optimizer, number in ((model, optimizer, number) for number in (1, 2)
                                     for model, optimizer in zip(models, optimizers)):
        if model is models[1]:
            raises(MemoryError, "cudaErrorMemoryAllocation", lambda: nibble_optim.Handle(
                {"device": "cuda", "preset": "adamw32"}, [("t", 1 << 20, 1 << 20, 0, -1)]))
        train(model, optimizer, number, number)
    assert same(*models)


def test_torch_kernels_are_loaded_once():
    """Optimizers of a process share their kernels, so those that come and go leave no device memory behind."""
    if len(DEVICES) < 2:
        return "skipped: no GPU"
    for number in range(1, 42):
        model = model_of("cuda")
        train(model, make(model, preset="adafactor8"), number, number)
        gc.collect()
        if number == 1:
            before = torch.cuda.mem_get_info()[0]
    lost = before - torch.cuda.mem_get_info()[0]
    assert lost <= 4 << 20, f"{lost >> 10} KiB less"


def test_torch_refused_capture_is_forgotten():
    """The gradients that a refused capture has named are those of the next step."""
    if len(DEVICES) < 2:
        return "skipped: no GPU"
    models = [model_of("cuda") for _ in range(2)]
    for model, refused in zip(models, (False, True)):
        optimizer, kept = make(model, preset="galore8", capturable=True), []
        for number in (1, 2):
            for p in model.parameters():
                kept.append(torch.sin(number + torch.arange(float(p.numel()), device="cuda")).view_as(p))
                p.grad = kept[-1]
            if refused and number == 2:
                def captured():
                    with torch.cuda.graph(torch.cuda.CUDAGraph()):
                        optimizer.step()
                raises(ValueError, "the host decides", captured)
            optimizer.step()
    assert same(*models)


def test_torch_threads_do_not_meet():
    """Optimizers of several threads, on a GPU each on a stream of its own, and refusals between their steps."""
    def work(run, errors):
        with torch.cuda.stream(torch.cuda.Stream()) if run.device == "cuda" else contextlib.nullcontext():
            try:
                for number in range(1, 9):
                    run.until(number)
                    raises(ValueError, "nothing", lambda: nibble_optim.Handle({"preset": "nothing"}, []))
                run.optimizer.state_dict()
                if run.device == "cuda":
                    torch.cuda.current_stream().synchronize()
            except Exception as error:
                errors.append(error)

    for device in DEVICES:
        alone, together = ([Run(device, "bfloat16", dict(preset=preset))
                            for preset in ("muon8", "galore8", "adamw8", "adafactor8")] for _ in range(2))
        if device == "cuda":
            torch.cuda.synchronize()
        errors = []
        [work(run, errors) for run in alone]
        threads = [threading.Thread(target=work, args=(run, errors)) for run in together]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert not errors, errors
        assert all(all(map(torch.equal, a.weights(), b.weights())) for a, b in zip(alone, together)), device


def test_torch_two_gpus():
    """Parameters on two GPUs step as they would alone; a mistake leaves the current GPU as it was."""
    if len(DEVICES) < 2 or torch.cuda.device_count() < 2:
        return "skipped: no two GPUs"
    for preset in ("adamw8", "muon8", "galore8"):
        models = [[model_of(f"cuda:{i}", torch.bfloat16) for i in (0, 1)] for _ in range(2)]
        both = torch.nn.ModuleList(models[0])
        optimizers = [make(both, preset=preset), *(make(model, preset=preset) for model in models[1])]
        for number in range(1, 4):
            for model in (*models[0], *models[1]):
                for p in model.parameters():
                    p.grad = torch.sin(number + torch.arange(float(p.numel()), device=p.device)).view_as(p).to(p)
            for optimizer in optimizers:
                optimizer.step()
        assert same(models[0][0], models[1][0]), preset
    raises(MemoryError, "allocate gave no memory",
           lambda: nibble_optim.Handle({"device": "cuda:1"}, [("t", 1, 5, 0, -1)], lambda _: 0))
    assert torch.cuda.current_device() == 0
