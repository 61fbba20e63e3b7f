//! The jobs whose shapes for background compilation were listed.

use std::collections::VecDeque;

use model::Request;
use residency::ComponentId;

use crate::messages::StageWork;

/// Jobs that are remembered: more than may have orders on one card.
const JOBS: usize = 64;

/// What the shapes of a job's stages depend on.
#[derive(Debug, PartialEq)]
struct ListedFor {
    stage: String,
    components: Vec<ComponentId>,
    request: Request,
    later_stages: Vec<String>,
    later_request: Option<Request>,
}

impl ListedFor {
    fn of(work: &StageWork) -> ListedFor {
        let shape_of = |request: &Request| Request {
            seed: 0,
            ..request.without_media_data()
        };
        ListedFor {
            stage: work.plan.name.clone(),
            components: work.components.iter().map(|c| c.id.clone()).collect(),
            request: shape_of(&work.request),
            later_stages: work.later_stages.clone(),
            later_request: work.later_request.as_ref().map(shape_of),
        }
    }
}

/// Jobs whose shapes were listed, the last one first. A list takes a millisecond or two: a prompt is tokenized for it.
#[derive(Debug, Default)]
pub(super) struct ListedJobs(VecDeque<(String, ListedFor)>);

impl ListedJobs {
    /// Remembers a job. Returns whether its shapes are to be listed: not those of a job that is known, nor of one that differs from such
    /// a job in nothing that they depend on, as segments of a session do.
    pub(super) fn takes(&mut self, job: &str, work: &StageWork) -> bool {
        if self.0.iter().any(|(known, _)| known == job) {
            return false;
        }
        let listed_for = ListedFor::of(work);
        let is_new = self.0.iter().all(|(_, known)| *known != listed_for);
        self.0.truncate(JOBS - 1);
        self.0.push_front((job.to_owned(), listed_for));
        is_new
    }
}

#[cfg(test)]
mod tests {
    use model::{Audio, Medium, Role, StagePlan, Values};

    use super::*;

    fn work(seconds: f32, seed: u64) -> StageWork {
        let audio = Audio {
            seconds,
            ..Audio::default()
        };
        let request = Request {
            seed,
            ..Request::of(Medium::Audio(audio), 8, 1.0, 1)
        };
        StageWork {
            plan: StagePlan::of("denoise", Role::Sample, Vec::<String>::new(), Vec::new()),
            components: Vec::new(),
            later_stages: vec!["decode".to_owned()],
            later_request: Some(request.clone()),
            later: Vec::new(),
            request,
            values: Values::new(),
            preview_interval_ms: 0,
        }
    }

    #[test]
    fn shapes_are_listed_once_for_jobs_that_differ_in_their_seeds_alone() {
        let mut listed = ListedJobs::default();
        assert!(listed.takes("a", &work(10.0, 1)));
        assert!(!listed.takes("a", &work(20.0, 1)), "a later stage of a job");
        assert!(!listed.takes("b", &work(10.0, 2)));
        assert!(listed.takes("c", &work(20.0, 1)));
        let mut decode = work(10.0, 1);
        decode.plan.name = "decode".to_owned();
        assert!(listed.takes("d", &decode), "another first stage");
        for number in 0..JOBS {
            assert!(listed.takes(&number.to_string(), &work(100.0 + number as f32, 1)));
        }
        assert!(
            listed.takes("e", &work(10.0, 3)),
            "those of long ago are forgotten"
        );
    }
}
