"""What a rank above 0 does: the same as rank 0, command by command, and nothing else."""
from collections import deque

from minispec.launch import join
from minispec.params import SamplingParams
from minispec.request import Request
from minispec.text import Decoder


def serve(make):
    """Makes the engine that rank 0 made, mirrors each of its commands, ends with it: never returns. make: Engine."""
    team = join()
    with team:
        _, options = team.commands.get()
        team.begin("loading")
        engines, requests = {0: make(**options, team=team)}, {}
        while True:
            team.what = ""
            action, number, *payload = team.commands.get()
            team.begin(action)
            engine = engines[number]
            if action == "step":
                engine._step(*payload)
            elif action == "add":
                key, index, ids, params = payload
                params = SamplingParams(**params | {"logit_bias": dict(params["logit_bias"])})
                decoder = Decoder(engine.tokenizer, params.stop) if engine.tokenizer else None
                request = requests[key] = Request(index, ids, params, engine.stops, engine.max_length, decoder)
                engine._inbox[id(request)] = deque(maxlen=0)        # nobody reads events here
                engine.scheduler.add(request)
            elif action == "finish":
                for request in filter(None, (requests.pop(key, None) for key in payload[0])):
                    engine.scheduler.finish(request)
                    del engine._inbox[id(request)]
            elif action == "score":
                engine.score(*payload)
            elif action == "reshaped":
                engines[payload[0]] = engine.reshaped(*payload[1:])
