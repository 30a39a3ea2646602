"""What ``--help`` shows beneath the options of each command: examples, with names such as my_recipe to fill in."""

TOP = """\
a first session:
  harness list envs                    what there is to play
  harness play Sokoban-v1              play it yourself
  harness eval --policy random --env Sokoban-v1
  harness run quick --dry-run          the cells of a recipe, and what they take
  harness run quick                    run what is missing of it, write report and figures
  harness run quick methods=[grpo] seeds=[0] train.updates=3 --out results/try

Running a command again re-runs nothing that is finished. Exit codes: 0 done, 1 something failed, 2 bad input.
"""

PERF = """\
rollout: sampling against transformers' generate. update: SEED beside GRPO. memory: of scoring, and of an update as it
grows. engine: ALFWorld's against the official one. trl: beside TRL's GRPOTrainer (pip install 'seed-harness[bench]').
report: of a made-up run of a million episodes. Exit code 1: a goal was missed.

  harness perf
  harness perf update --episodes 64
"""

RUN = """\
overrides are key=value with dots, values are YAML:
  harness run quick seeds=[0,1,2]                       more seeds; finished ones are kept
  harness run quick envs=[EZPoints-v1] methods=[grpo]   one environment, one method
  harness run quick train.updates=3                     in every cell, whatever environments say
  harness run quick envs.Sokoban-v1.train.updates=3     in one environment's cells
  harness run my_recipe.yaml --out results/mine --jobs 4
  harness run my_recipe.yaml needs.gpus=1 --cluster ray   one GPU for each cell, on all nodes of RAY_ADDRESS
  accelerate launch --multi_gpu --num_processes 8 -m harness run my_recipe.yaml   eight processes for each cell

A run that was interrupted, even by kill -9, continues from its checkpoints when it is started again.
"""

EVAL = """\
examples:
  harness eval --policy random --env Sokoban-v1
  harness eval --policy tiny --env ALFWorld-v1 --env-option data=official --panel valid_seen
  harness eval --policy results/quick/cells/HASH/policy --env EZPoints-v1 --temperature 0
  harness eval --policy Qwen/Qwen2.5-VL-3B-Instruct --env Sokoban-v1 --panel-size 32
  harness eval --policy api:my-model@http://localhost:8000/v1 --env ALFWorld-v1 --panel-size 32

An endpoint's key is read from OPENAI_API_KEY. An interrupted evaluation plays on where it stopped. Batch size, workers
and concurrency change the speed, never the score.
"""

NEW_ENV = """\
examples:
  harness new-env TrafficLights
  harness new-env TrafficLights --vision --out ~/work/lights

The package has a little game, its tests, a recipe and a README whose commands work at once.
"""

PLAY = """\
examples:
  harness play Sokoban-v1
  harness play ALFWorld-v1 --task 7 --style paper
  harness play EZPoints-v1 --images files

Shows the observation, or with --style the very prompt that a policy gets.
"""

CHECK = """\
examples:
  harness check Sokoban-v1
  harness check my_package.my_env:MyEnv --env-option size=5

Prints one line per rule; exit code 1 if one is broken.
"""
