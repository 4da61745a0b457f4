"""What pages of the cross-check say beside figures: what plans are, and why predictors differ."""

BESIDE = """## What the plans are

Plans come from 25 problems: the commands' default problem, and each calibrated hardware of the
catalogue on one node, on 2 or 4 and on 8 to 64 nodes, with a model that fits its memory. Up to
four plans of each problem are those that `mist`, `aceso`, `megatron` and `deepspeed` propose in
100 evaluations. The others are random plans of all engines, in equal parts (as far as there are
such plans) with one micro-batch, with fewer micro-batches than stages, as many, and more. Half of
them had to be close to the memory limit. Micro-batches times blocks are at most 3,000, so large
clusters have few micro-batches. Nothing of the kind was published.

## Why the two differ

If nothing overlaps, contends or stalls, they agree to 1e-9 (`tests/simulators/test_events.py`).
So do pipelines of equal stages with equal sends (`tests/simulators/test_pipelines.py`).
Otherwise:

- *Stages of few blocks* that swap more than they compute: one to four blocks whose copies take up
  to ten times as long as their passes, on fast GPUs. Slots are barriers in the closed form, but
  not in the simulator: there swaps of one pass go on in the next, and while a stage waits.
- *Gradients swapped whole* in each pass: the same effect, in steady passes.
- *Sends of several stages* that share a node's network at one time are slower only where they are
  played. The closed form knows the sends of one stage alone.
- *Sends beside passes*: whether a send begins while the next pass runs depends on what the stage
  waits for. The closed form lets all sends of steady passes begin beside the next pass, and only
  the first micro-batch's send is slowed by arithmetic alone.
- *What is left of a pass* still takes the link or computes when a stage waits shortly. In the
  closed form a micro-batch finds a stage that waits idle.

An earlier population had two kinds of hardware on one or two nodes, and never fewer micro-batches
than stages; over it 95 % of the plans were within 1.8 %. Over this population, with only sends in
rounds repaired, 95 % were within 3.8 %, and single plans came out 15 % too short or 19 % too long
([what was repaired](../decisions/0008-pipeline-objective.md)).

A played iteration knows more than the closed form: stages that send at one time share their
node's network, micro-batches may differ, and tasks may vary ([how fast](speed.md))."""

BESIDE_WIDE = """## What the plans are

Eight models of today (GPT, Llama, Qwen, and with experts Mixtral, Qwen, gpt-oss and DeepSeek V2)
on 1 to 32 nodes of eight A100, H100, H200 or B200. Plans are of all engines in turn, in all orders
that each engine runs, with equal degrees on all stages. A third of the problems of GPUs with 8-bit
arithmetic have fp8. Plans need not be close to the memory limit, but fit. Nothing of the kind was
published. The plans of Mist's dimensions are [a page of their own](cross-check.md).

What was wrong in which predictor, and what is left, is in [the decision about
orders](../decisions/0033-orders-of-others.md)."""
