"""Secure sums: the server learns the total of the sites' replies, but no single reply.

The protocol follows Bonawitz et al. (2017, "Practical secure aggregation for privacy-preserving
machine learning"), shortened for few and mostly reliable sites: their keys are known beforehand, so
that no message exchanges keys. Nothing here imports torch or Flower.

**Who knows what.** Every site has an X25519 key, from which it shares a secret with each other
site, and an Ed25519 key to sign with; both stay at the site. All hold the *roster*, the list of
public keys, whose fingerprint is in each site's policy. The server knows the roster and sees every
message; it is trusted with nothing. Up to ``colluding`` sites may help it.

**Context.** Everything is tied to one exchange: roster, run, attempt, stage, round, phase, the
participants, and everything else that the sites use to compute their replies and must share, such
as the request and the release that each has committed to (``protocol.keys.Context``,
``client.answer.agreed``). Sites that were asked different things, have committed to different
noise, or were given different participants have different contexts: their masks do not cancel, and
their signatures do not count for one another.

**Messages** of an exchange among participants P, of which U survive:

1. The request as without secure sums, and P. Site i answers with ``x_i + own_i + sum_j +-pair_ij``
   modulo 2^64 or 2^32 (:mod:`~.masks`). ``pair_ij`` comes from the secret of i and
   j, ``own_i`` from a seed that it splits over P (:mod:`~.masks`), any ``colluding + 1`` of whom
   can rebuild it; every part is encrypted for its site.
2. The list U. A site signs it if it has at least ``least_sites`` members, itself among them.
3. All signatures of U, and the parts that its members have made for this site. It checks each
   signature and gives its parts of ``own_j`` for j in U, and its own ``pair_id`` for every d in P
   but not in U. The server subtracts them from the sum over U (``server.secure_sums``).

**Recorded before anything is sent**, on disk (:mod:`~.sum_site`): that a context is answered,
before the action reads a record; the one list that is signed for it; and that it was opened. A
repeated request gets an error, also after a crash.

**Why it holds.** An honest site signs one list per context and opens only one that all its members
have signed. So two lists that are opened have no honest member in common. For honest i and j in U,
``pair_ij`` is opened by nobody: of U's honest members the server learns the sum alone, and they are
at least ``least_sites - colluding``, two or more. The value of an honest site outside of U keeps
its own mask, of which only ``colluding`` parts can be obtained. A server that lies about who
dropped out gets sums of fewer sites, within that bound, or nothing.

**Dropouts.** If a site drops out before its first answer, the total is that of the others. If it
drops out between its first answer and its signature, the exchange fails. After its signature
``colluding + 1`` sites suffice, unless another one has dropped out before, whose masks each
survivor must open. The total is never wrong: a mask that does not cancel makes values uniform, of
which half lie outside of sites x range.

**Not hidden:** who takes part, how long each site computes, and the total; without privacy also
what clients state about themselves before the run, such as their records by split and class. Sums
of the same records over different rounds can be compared; only noise protects against that.
"""
