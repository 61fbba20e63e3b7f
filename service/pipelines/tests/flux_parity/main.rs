//! FLUX against its diffusers reference, on the tiny pipelines of `fixtures/make_fixtures.py`.

mod checkpoints;
mod components;
mod mutations;
mod numbers;
mod pictures;
mod stages;
mod workshop;
