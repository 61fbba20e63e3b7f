//! The predicted time of stages on a card, with and without what is streamed to it.

use residency::{Bytes, Component, Part, StagePace, StageSeconds};

use super::record::JobRecord;
use super::report::Streamed;
use super::view::View;
use crate::need::Need;

impl View<'_> {
    /// The time of a step's stage with these parts of its components, as far as the speeds of the card are known.
    pub(super) fn seconds_of(
        &self,
        job: &JobRecord,
        index: usize,
        card: usize,
        need: &Need,
        parts: &[(Component, Part)],
    ) -> Option<StageSeconds> {
        let plan = need.plan.as_ref()?;
        let speeds = self.cards[card].speeds;
        let key = job.stage_key(index)?;
        let learned = self.learned.pass_seconds(&key, card);
        let by_flops =
            || Some(plan.passes.flops as f64 / speeds.flops? as f64).filter(|seconds| *seconds > 0.0);
        let pace = StagePace {
            passes: need.passes(),
            pass_seconds: learned.or_else(by_flops)?,
            link: match parts.iter().any(|(_, part)| *part != Part::WHOLE) {
                true => speeds.link?,
                false => Bytes::ZERO, // nothing crosses it
            },
        };
        Some(pace.predict(parts.iter().map(|(component, part)| (component, *part))))
    }

    /// Those of these components of a step's stage of which a part is on a card, with what that costs.
    pub(super) fn streamed(
        &self,
        job: &JobRecord,
        index: usize,
        card: usize,
        need: &Need,
        parts: &[(Component, Part)],
    ) -> Vec<Streamed> {
        let in_step = need.plan.as_ref().map_or(1, |plan| plan.passes.in_step);
        let repeats = need.passes() > 1;
        let more = self.seconds_of(job, index, card, need, parts).filter(|_| repeats);
        let more = more.map(|seconds| seconds.more_each_pass * f64::from(in_step));
        let each_pass = |(component, part): &(Component, Part)| component.size_of(*part).streamed;
        let all: Bytes = parts.iter().map(each_pass).sum();
        let in_part = parts.iter().filter(|(_, part)| *part != Part::WHOLE);
        let streamed = in_part.map(|each| Streamed {
            component: each.0.clone(),
            part: each.1,
            link: self.cards[card].speeds.link,
            // Components that are streamed together share what it costs.
            more_seconds: more.map(|more| more * each_pass(each).0 as f64 / all.0.max(1) as f64),
        });
        streamed.collect()
    }
}
