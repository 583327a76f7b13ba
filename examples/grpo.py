"""Teaches a small language model sums: by examples, then by reward (GRPO). Any process may be killed at any time.

rolecall run examples/grpo.py --generators 2 --rewards 2
rolecall run examples/grpo.py --staleness 0         # synchronous: the same bits, whoever is killed, joins or leaves
rolecall run examples/grpo.py --model hf:DIRECTORY  # a Hugging Face model in the place of the small one
rolecall eval examples/grpo.py --checkpoint runs/grpo-...
"""

import queue
import random
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal, TypedDict

import torch
from pydantic import Field
from torch import Tensor, nn

from rolecall import Context, FromUser, Job, Queue, Role, Settings, remote


class Grpo(Settings):
    generators: int = Field(2, ge=1, le=64, description="generators that a start waits for")
    rewards: int = Field(2, ge=1, le=64, description="reward workers that a start waits for")
    model: Annotated[str, FromUser(unless="toy")] = Field("toy", description="toy, or hf:DIRECTORY of a causal model")
    engine: Literal["torch", "vllm"] = Field("torch", description="what generators sample with")
    width: int = Field(128, ge=8, multiple_of=4, description="width of the toy model")
    digits: int = Field(2, ge=2, le=3, description="digits of the numbers that are added")
    taught: int = Field(200, ge=0, description="optimizer steps by examples, before those by reward")
    goal: float = Field(0.95, ge=0, description="accuracy at which the job ends; over 1: never")
    updates: int = Field(1000, ge=1, description="optimizer steps, of both kinds, after which the job ends")
    groups: int = Field(32, ge=1, description="prompts of an update, of all generators together")
    group: int = Field(8, ge=2, description="answers to a prompt")
    staleness: int = Field(4, ge=0, description="versions that samples may be behind; 0: generators wait for weights")
    buffer: int = Field(2, ge=1, description="batches in the queue before generators wait")
    lr: float = Field(1e-3, gt=0, le=1, description="learning rate for examples")
    reward_lr: float = Field(1.5e-4, gt=0, le=1, description="learning rate for rewards")


def sums(digits: int) -> tuple[list[str], list[str]]:
    """The prompts to learn from, and 256 held out, on which the accuracy is measured."""
    prompts = [f"{a:0{digits}}+{b:0{digits}}=" for a in range(10**digits) for b in range(10**digits)]
    random.Random(0).shuffle(prompts)
    return prompts[256:], prompts[:256]


def solve(prompt: str) -> str:
    return str(sum(map(int, prompt.rstrip("=").split("+"))))


class Policy(nn.Module, ABC):
    """A language model, from tokens [n, length] to logits [n, length, vocabulary], and its encoding of text."""

    end: int  # the token after an answer
    pad: int  # the token before a prompt that is shorter than others

    @abstractmethod
    def encode(self, texts: list[str], answers: bool = False) -> Tensor:
        """Prompts, padded on the left; or answers, followed by ends."""

    @abstractmethod
    def decode(self, answers: Tensor) -> list[str]:
        """The texts up to the first end."""

    @torch.no_grad()
    def sample(self, prompts: list[str], group: int, most: int, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the prompts, of `group` answers to each, and the log probabilities of those."""
        asked = self.encode(prompts).to(next(self.parameters()).device).repeat_interleave(group, 0)
        answers, logprobs = asked[:, :0], asked[:, :0].float()
        for _ in range(most):
            scores = self(torch.cat([asked, answers], 1))[:, -1].log_softmax(-1)
            token = scores.argmax(-1, keepdim=True) if greedy else scores.exp().multinomial(1)
            answers, logprobs = torch.cat([answers, token], 1), torch.cat([logprobs, scores.gather(1, token)], 1)
        return asked.cpu(), answers.cpu(), logprobs.cpu()

    def judge(self, prompts: Tensor, answers: Tensor) -> tuple[Tensor, Tensor]:
        """The log probabilities of the answers' tokens, and which of these are not after the end."""
        tokens = torch.cat([prompts, answers], 1).to(next(self.parameters()).device)
        scores, answers = self(tokens[:, :-1]).log_softmax(-1), tokens[:, prompts.shape[1] :]
        ends = (answers == self.end).long()
        return scores[:, -answers.shape[1] :].gather(2, answers[..., None])[..., 0], ends.cumsum(1) - ends == 0


class Toy(Policy):
    """A transformer over characters, which writes an answer from its last digit on: carries come first."""

    alphabet = "0123456789+=\n"
    end, pad = alphabet.index("\n"), alphabet.index("0")

    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 5, nn.LayerNorm(width), enable_nested_tensor=False)
        self.characters, self.places = nn.Embedding(len(self.alphabet), width), nn.Embedding(16, width)
        self.head = nn.Linear(width, len(self.alphabet))

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.characters(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.layers(x, mask, is_causal=True))  # type: ignore[no-any-return]

    def encode(self, texts: list[str], answers: bool = False) -> Tensor:
        length = max(map(len, texts)) + answers
        filled = [text[::-1].ljust(length, "\n") if answers else text.rjust(length, "0") for text in texts]
        return torch.tensor([[self.alphabet.index(character) for character in text] for text in filled])

    def decode(self, answers: Tensor) -> list[str]:
        return ["".join(self.alphabet[token] for token in row).partition("\n")[0][::-1] for row in answers.tolist()]


def build(settings: Grpo, sampling: bool = False) -> Policy:
    if (settings.model, settings.engine) == ("toy", "torch"):
        return Toy(settings.width)
    import grpo_models

    return grpo_models.build(settings, sampling)


class Batch(TypedDict):  # a group of answers to each of n prompts, one group after the other
    prompts: Tensor
    answers: Tensor
    logprobs: Tensor
    rewards: Tensor  # [n, group]
    version: int  # of the weights


def example(prompt: str) -> str:
    """An answer to learn from. Every other one forgets the carries, a mistake that only the reward corrects."""
    if random.random() < 0.5:
        return solve(prompt)
    first, second = prompt.rstrip("=").split("+")
    return str(int("".join(str((int(a) + int(b)) % 10) for a, b in zip(first, second, strict=True))))


def example_loss(policy: Policy, prompts: list[str]) -> Tensor:
    answers = policy.encode([example(prompt) for prompt in prompts], answers=True)
    logprobs, mask = policy.judge(policy.encode(prompts), answers)
    return -logprobs[mask].mean()


def reward_loss(policy: Policy, batch: Batch, clip: float = 0.2) -> Tensor:
    logprobs, mask = policy.judge(batch["prompts"], batch["answers"])
    rewards = batch["rewards"].to(logprobs.device)
    gains = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (logprobs - batch["logprobs"].to(logprobs.device)).exp()
    return -torch.min(ratio * gains, ratio.clamp(1 - clip, 1 + clip) * gains)[mask].mean()


def accuracy(policy: Policy, digits: int) -> float:
    prompts = sums(digits)[1]
    texts = policy.decode(policy.sample(prompts, 1, digits + 2, greedy=True)[1])
    return sum(text == solve(prompt) for prompt, text in zip(prompts, texts, strict=True)) / len(prompts)


def evaluate(settings: Grpo, state: dict[str, Any]) -> dict[str, float]:
    policy = build(settings)
    policy.load_state_dict(state["policy"])
    return {"accuracy": accuracy(policy, settings.digits)}


class Reward:
    """Checks answers."""

    def __init__(self, context: Context[Grpo]) -> None:  # load a model that judges, or start a sandbox, here
        pass

    @remote(idempotent=True)  # if this worker is lost, another one is asked
    def check(self, prompts: list[str], answers: list[str]) -> list[float]:
        return [float(answer == solve(prompt)) for prompt, answer in zip(prompts, answers, strict=True)]


# region generator
class Generator:
    """Samples batches with the newest weights that are here."""

    def __init__(self, context: Context[Grpo]) -> None:  # once a process, which stays if the learner is lost
        self.context, self.policy = context, build(context.settings, sampling=True).to(context.device)
        self.weights, self.version, self.known = context.subscribe("policy"), -1, sums(context.settings.digits)[0]

    def run(self) -> None:  # ends with a PeerLostError if the learner is lost; called again once that is back
        settings = self.context.settings
        batches: Queue[Batch] = self.context.queue("batches", settings.buffer)
        while settings.staleness > 0:
            self.load(new=False)
            batches.put(self.sample(settings.groups // len(self.context.peers("generator"))))

    @remote(idempotent=True, serial=True)  # if this worker is lost, another one samples the same
    def share(self, number: int, version: int) -> Batch:
        """One of GENERATORS parts of a synchronous update, by the weights of `version`."""
        context, generation = self.context, self.context.generation
        while self.version != version and context.generation == generation:  # after it, nobody waits for the answer
            self.load(new=True)
        seed = context.shared_seed(version, number)
        random.seed(seed)
        torch.manual_seed(seed)
        return self.sample(context.settings.groups // context.settings.generators)

    def load(self, new: bool) -> None:
        self.weights.wait(self.context.settings.phase_timeout, new=new)
        if self.weights.new:
            self.version, tensors = self.weights.tensors()
            self.policy.load_state_dict(tensors)

    def sample(self, count: int) -> Batch:
        group, asked = self.context.settings.group, random.choices(self.known, k=max(1, count))
        prompts, answers, logprobs = self.policy.sample(asked, group, self.context.settings.digits + 2)
        texts, repeated = self.policy.decode(answers), [prompt for prompt in asked for _ in range(group)]
        rewards = torch.tensor(self.context.call_any(Reward.check, repeated, texts).result()).view(-1, group)
        return Batch(prompts=prompts, answers=answers, logprobs=logprobs, rewards=rewards, version=self.version)


# endregion
def learner(context: Context[Grpo]) -> dict[str, float]:  # rank 0
    torch.manual_seed(context.shared_seed())  # the same weights in each generation
    settings, policy = context.settings, build(context.settings).to(context.device)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95))
    batches: Queue[Batch] = context.queue("batches", settings.buffer)
    counts, known = {"score": 0.0, "tokens": 0, "stale": 0}, sums(settings.digits)[0]
    state = context.restore({"policy": policy, "optimizer": optimizer, "batches": batches, **counts})
    for update in context.steps(settings.updates, until=lambda: state["score"] >= settings.goal, goal=settings.goal):
        if update > settings.taught:
            context.publish("policy", policy.state_dict(), version=update - 1)
            if not (taken := take(context, batches, update - 1, state)):
                context.redo()  # the job ends, and generators have left
                continue
            loss = torch.stack([reward_loss(policy, batch) for batch in taken]).mean()
            rate, age = settings.reward_lr, sum(update - 1 - batch["version"] for batch in taken) / len(taken)
            reward = torch.cat([batch["rewards"] for batch in taken]).mean().item()
            context.log(reward=reward, age=age, stale=state["stale"])
        else:
            random.seed(context.shared_seed(update))
            loss = example_loss(policy, random.choices(known, k=settings.groups * settings.group))
            rate = settings.lr * min(1, update / 20)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        context.require_finite(loss.item(), norm.item(), hint="the loss is not finite; lower LR and REWARD_LR")
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        context.log(loss=loss.item(), done=state["tokens"])
        if update % 10 == 0:
            with context.evaluating():
                state["score"] = accuracy(policy, settings.digits)
            context.log(score=state["score"])
    return {name: state[name] for name in counts}


def take(context: Context[Grpo], batches: Queue[Batch], version: int, counts: dict[str, Any]) -> list[Batch]:
    """A batch for each generator, sampled by weights of `version` or, if STALENESS allows it, by older ones."""
    if context.settings.staleness == 0:  # in order, on which a sum of floats depends
        taken = list(context.map(Generator.share, range(context.settings.generators), version))
    else:
        taken = list[Batch]()
        while len(taken) < max(1, len(context.peers("generator"))) and not context.draining:
            try:
                batch = batches.get(timeout=1.0)
            except queue.Empty:  # generators load, or were lost
                continue
            if version - batch["version"] > context.settings.staleness:
                counts["stale"] += 1
            else:
                taken.append(batch)
    counts["tokens"] += sum(batch["answers"].numel() for batch in taken)
    return taken


ROLES = [Role("learner", learner), Role("generator", Generator, "generators", 1), Role("reward", Reward, "rewards", 1)]
JOB = Job(ROLES, settings=Grpo, evaluate=evaluate, score="accuracy", unit="tokens", pinned=["model", "width", "digits"])
