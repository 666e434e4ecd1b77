"""A held-out evaluation over ranks."""

from dataclasses import dataclass

from distributed import pool


@dataclass
class Judged:
    """Of a completion: what an evaluation reads."""

    score: object
    ids: list[int]
    truncated: bool = False

    @property
    def reward(self) -> float:
        return self.score.score


def evaluate(num_prompts: int, unscored: int | None = None) -> tuple[int, int, dict[str, float]]:
    import torch.distributed as dist

    from coati_ext.models.generation import Sampling
    from coati_ext.models.reward_score.score import Score, not_scorable
    from coati_ext.trainer.evaluation import Evaluation

    asked = []

    def rollout(prompts, sampling, num_samples):
        asked.append(len(prompts))
        right = Score(score=1.0, accuracy=1.0, parts={"score": 1.0}, reason="correct")
        wrong = Score(score=0.0, accuracy=0.0, parts={"score": 0.0}, reason="wrong")
        verdicts = [{0: right, unscored: not_scorable("timeout")}.get(p["number"], wrong) for p in prompts]
        return [[Judged(verdict, [1] * 4)] * num_samples for verdict in verdicts]

    sampling = Sampling(max_new_tokens=4, stop_ids=(0,))
    shares = {"dp_rank": dist.get_rank(), "dp_size": dist.get_world_size()}
    evaluation = Evaluation(rollout, [{"text": "q"}] * num_prompts, sampling, 2, **shares)
    return asked, evaluation.num_prompts, evaluation(dist.group.WORLD)


def test_fewer_held_out_prompts_than_ranks_are_evaluated_once():
    first, second = pool(2).run(evaluate, 1)
    assert (first[0], second[0]) == ([1, 1], [0, 0]) and first[2] == second[2]
    assert (first[2]["eval/accuracy"], first[2]["eval/length"], first[2]["eval/pass@2"]) == (1.0, 4.0, 1.0)


def test_every_rank_takes_its_share_of_the_held_out_prompts():
    first, second = pool(2).run(evaluate, 3)
    assert (first[0], second[0]) == ([2, 2], [1, 1]) and first[1] == second[1] == 3
    assert first[2] == second[2] and abs(first[2]["eval/accuracy"] - 1 / 3) < 1e-6


def test_the_share_without_a_score_is_told():
    first, second = pool(2).run(evaluate, 4, 2)
    assert first[2] == second[2] and first[2]["eval/unscored"] == 0.25
    assert abs(first[2]["eval/accuracy"] - 1 / 3) < 1e-6
