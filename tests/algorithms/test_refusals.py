"""What an algorithm cannot do is refused when a run is composed, by its settings."""

import pytest

from ..refusals import refuses
from ..rows import rows

HALVING = "algorithm=successive_halving"
REFUSED = r"""
algorithm=fdnas search_space=nasbench201_small | paths of blocks; set search_space=mbconv
$FDNAS algorithm.alphas.weight_decay=1e-3 | ops that are not sampled must keep
$FDNAS privacy=dp search_space.norm=batch | set search_space.norm=group
algorithm=feathers algorithm.ranges.momentum={low:2.0,high:1.0,log:false} | high=1.0 .* 2.0 or more
algorithm=fedex privacy=dp | record with algorithm=fedex is not possible
algorithm=fedex dataset.fractions={train:.8,validation:0,test:.2} | fractions.validation=0\.0
server_optimizer=adam | server_optimizer=adam with algorithm=fed_darts: it is for the training of a
    given network; set algorithm=fedavg or fedprox
algorithm=fedavg server_optimizer.lr=1 | server_optimizer\.lr
algorithm=fedavg aggregate=median clients=20 secure_sum=true | secure_sum=true with
    aggregate=median: it compares values of single clients
$LOCAL rounds=3 | rounds=3 with algorithm.rewarded=local: at most 2 rounds .* rounds=2
$LOCAL privacy=dp rounds=2 | algorithm.rewarded=local with privacy=dp: .* set
    algorithm.rewarded=averaged
$HALVING algorithm.pool={draws:1,keep:null} | pool.draws=1 is out of range: expected 2 or more
$HALVING algorithm.pool={draws:9,keep:10} | pool.keep=10 is out of range.*draws=9
$LOCAL algorithm.pool.shortlist={keep:3,scores:[synflow]} | shortlist.keep=3 .* 4 to draws=9
$DATA_FREE algorithm.shortlist={keep:5,scores:[synflow]} | shortlist.keep=5 .* 2 to draws=4
$DATA_FREE algorithm.limits.latency_ms=3 | a limit of latency needs a table
"""
SPELT = {
    "FDNAS": "algorithm=fdnas search_space=mbconv_small retrain=mbconv",
    "HALVING": HALVING,
    "LOCAL": f"{HALVING} algorithm.pool={{draws:9,keep:4}} algorithm.rewarded=local",
    "DATA_FREE": "algorithm=zero_cost algorithm.draws=4",
}


@pytest.mark.parametrize(("overrides", "words"), rows(REFUSED, **SPELT))
def test_what_cannot_be_is_refused_in_a_sentence(overrides, words, compose_config):
    refuses(words, compose_config, *overrides.split())
