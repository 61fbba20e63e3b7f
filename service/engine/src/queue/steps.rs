//! Which stages of a plan a job runs, and in which order. Pure functions over a plan and a request.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;

use model::{Role, StagePlan, ValueShape};
use residency::Policy;

use crate::job::Run;

/// The work of one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JobStepKind {
    /// A stage, by its index in the plan.
    Stage(usize),
    /// Load components of a model.
    Load(Model),
    /// Unload components of a model for a swap. That needs no order, since it needs no memory.
    Unload(Model),
}

/// One of the two models of a swap; any other job has only its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// The job's own.
    Own,
    /// The model that it replaces.
    Replaced,
}

/// A step of a job, and the item that it is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct JobStep {
    pub(super) kind: JobStepKind,
    pub(super) item: u32,
}

impl JobStep {
    /// A step that is for no item.
    pub(super) fn of(kind: JobStepKind) -> JobStep {
        JobStep { kind, item: 0 }
    }

    pub(super) fn is_unload(&self) -> bool {
        matches!(self.kind, JobStepKind::Unload(_))
    }
}

/// The steps of a job, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct JobSteps {
    steps: Vec<JobStep>,
    /// By compute dtype, the last step that needs each component, by name.
    last_needs: BTreeMap<String, BTreeMap<String, usize>>,
}

impl Deref for JobSteps {
    type Target = [JobStep];

    fn deref(&self) -> &[JobStep] {
        &self.steps
    }
}

impl JobSteps {
    /// Steps whose stages are those of these plans, by compute dtype.
    pub(super) fn new(steps: Vec<JobStep>, plans: &BTreeMap<String, Vec<StagePlan>>) -> JobSteps {
        let last_needs = plans.iter().map(|(dtype, plan)| {
            let stages = steps
                .iter()
                .enumerate()
                .filter_map(|(index, step)| match step.kind {
                    JobStepKind::Stage(stage) => Some((index, plan.get(stage)?)),
                    JobStepKind::Load(_) | JobStepKind::Unload(_) => None,
                });
            let needs =
                stages.flat_map(|(index, stage)| stage.components.iter().map(move |name| (name, index)));
            let last: BTreeMap<&String, usize> = needs.collect();
            let last = last.into_iter().map(|(name, index)| (name.clone(), index));
            (dtype.clone(), last.collect())
        });
        JobSteps {
            last_needs: last_needs.collect(),
            steps,
        }
    }

    /// Names of the components that steps after the one at `index` need on cards of a dtype, in the order of names.
    pub(super) fn needed_later(&self, index: usize, dtype: &str) -> impl Iterator<Item = &String> {
        let last_needs = self.last_needs.get(dtype).into_iter().flatten();
        last_needs.filter_map(move |(name, last)| (*last > index).then_some(name))
    }

    /// Puts an unload before the step at `index`.
    pub(super) fn unload_before(&mut self, index: usize, model: Model) {
        self.steps.insert(index, JobStep::of(JobStepKind::Unload(model)));
        let later = self.last_needs.values_mut().flat_map(BTreeMap::values_mut);
        for last in later.filter(|last| **last >= index) {
            *last += 1;
        }
    }
}

/// The values that decoding takes, each once: a client may keep them, upload them again, and have them decoded later. Values
/// that one decode leaves for the next are not among them.
pub(super) fn decodable(plan: &[StagePlan]) -> Vec<&ValueShape> {
    let decodes = || plan.iter().filter(|stage| stage.role == Role::Decode);
    let is_left = |name: &String| decodes().any(|stage| stage.gives.contains(name));
    let mut values: Vec<&ValueShape> = Vec::new();
    for value in decodes().flat_map(|stage| &stage.takes) {
        if !is_left(&value.name) && !values.iter().any(|known| known.name == value.name) {
            values.push(value);
        }
    }
    values
}

/// The stages that a run needs, by their indices in the plan. A run may start with values of its own, from the first stage
/// of the role `run.start` on; no stage is run to make those.
pub(super) fn needed(plan: &[StagePlan], run: &Run) -> Vec<usize> {
    let kept = decodable(plan).into_iter().map(|value| value.name.as_str());
    let kept: BTreeSet<&str> = kept.collect();
    let mut wanted = match run.until {
        Role::Decode => BTreeSet::new(),
        Role::Encode | Role::Sample => kept.clone(),
    };
    let brought_to = run.start.as_ref().map(|start| start.role);
    let mut needed = Vec::new();
    for (index, stage) in plan.iter().enumerate().rev() {
        if stage.role > run.until {
            continue;
        }
        if brought_to.is_some_and(|role| stage.role < role) {
            wanted.retain(|name| !kept.contains(name));
        }
        let gives_it = stage.gives.iter().any(|name| wanted.contains(name.as_str()));
        if stage.role == Role::Decode || gives_it {
            wanted.retain(|name| !stage.gives.iter().any(|given| given == name));
            wanted.extend(stage.takes.iter().map(|value| value.name.as_str()));
            needed.push(index);
        }
    }
    needed.reverse();
    needed
}

/// Whether a result is made section by section: then each section is decoded and sent right after its sampling.
fn is_in_sections(plan: &[StagePlan]) -> bool {
    plan.iter()
        .any(|stage| stage.section.is_some_and(|section| section.of > 1))
}

/// The steps of a run: stages that run once, then the stages of each item. Where one large component at a time is on the card, all
/// sampling is done before the first decode, except in results with sections.
pub(super) fn steps_of(plan: &[StagePlan], run: &Run, policy: Policy) -> Vec<JobStep> {
    let needed = needed(plan, run);
    let step = |stage: &usize, item| JobStep {
        kind: JobStepKind::Stage(*stage),
        item,
    };
    let (each, once): (Vec<usize>, Vec<usize>) = needed.into_iter().partition(|&stage| plan[stage].per_item);
    let mut steps: Vec<JobStep> = once.iter().map(|stage| step(stage, 0)).collect();
    for item in 0..run.count.max(1) {
        steps.extend(each.iter().map(|stage| step(stage, item)));
    }
    if policy == Policy::Exclusive && !is_in_sections(plan) {
        let decodes = |step: &JobStep| matches!(step.kind, JobStepKind::Stage(stage) if plan[stage].role == Role::Decode);
        steps.sort_by_key(decodes); // stable: items stay in order
    }
    steps
}

/// The steps of a load, with those of the run that proves its model. The unload of the replaced model is the last.
pub(super) fn steps_of_load(
    plan: &[StagePlan],
    proof: Option<&Run>,
    replaces: bool,
    policy: Policy,
) -> Vec<JobStep> {
    let mut steps = vec![JobStep::of(JobStepKind::Load(Model::Own))];
    steps.extend(proof.iter().flat_map(|run| steps_of(plan, run, policy)));
    steps.extend(replaces.then_some(JobStep::of(JobStepKind::Unload(Model::Replaced))));
    steps
}

/// The steps that undo a swap: components that were loaded for the new model are unloaded, and those that were unloaded for
/// it are loaded again.
pub(super) fn undo_of_swap() -> Vec<JobStep> {
    vec![
        JobStep::of(JobStepKind::Unload(Model::Own)),
        JobStep::of(JobStepKind::Load(Model::Replaced)),
    ]
}

#[cfg(test)]
mod tests {
    use model::{Image, Medium, Request, Rung};
    use residency::Bytes;

    use super::*;
    use crate::job::Start;

    fn stage(name: &str, role: Role, takes: &[&str], gives: &[&str], per_item: bool) -> StagePlan {
        StagePlan {
            name: name.into(),
            role,
            components: Vec::new(),
            rungs: vec![Rung {
                label: "whole".into(),
                scratch: Bytes::ZERO,
                approximate: false,
                from_host: Vec::new(),
                copies: Vec::new(),
            }],
            shape: String::new(),
            steps: 1,
            takes: takes.iter().map(|name| ValueShape::new(name, vec![1])).collect(),
            gives: gives.iter().map(|&name| name.into()).collect(),
            per_item,
            memo: None,
            section: None,
            shared: None,
            passes: model::Passes::default(),
            reads_media: true,
            preview: None,
        }
    }

    /// A picture's sound and frames, from text and a picture to start from.
    fn plan(from_latent: bool) -> Vec<StagePlan> {
        let takes: &[&str] = if from_latent {
            &["text", "frames"]
        } else {
            &["text"]
        };
        vec![
            stage("text", Role::Encode, &[], &["text"], false),
            stage("picture", Role::Encode, &[], &["frames"], true),
            stage("sample", Role::Sample, takes, &["frames", "sound"], true),
            stage("frames", Role::Decode, &["frames"], &[], true),
            stage("sound", Role::Decode, &["sound"], &[], true),
        ]
    }

    fn run(start: Option<Role>, until: Role, count: u32) -> Run {
        Run {
            call: crate::job::Call::GenerateImage,
            request: Request::of(Medium::Image(Image::of(16, 16)), 1, 0.0, 1),
            count,
            start: start.map(|role| Start {
                latent: "latent-1".into(),
                role,
            }),
            until,
            keep_latent: false,
            preview_interval_ms: 0,
        }
    }

    fn names(plan: &[StagePlan], run: &Run) -> Vec<String> {
        needed(plan, run)
            .into_iter()
            .map(|index| plan[index].name.clone())
            .collect()
    }

    #[test]
    fn a_run_needs_the_stages_that_lead_to_its_last_role() {
        let all = run(None, Role::Decode, 1);
        assert_eq!(names(&plan(false), &all), ["text", "sample", "frames", "sound"]);
        assert_eq!(
            names(&plan(true), &all),
            ["text", "picture", "sample", "frames", "sound"]
        );
        assert_eq!(
            names(&plan(true), &run(None, Role::Sample, 1)),
            ["text", "picture", "sample"]
        );
        assert_eq!(names(&plan(true), &run(None, Role::Encode, 1)), ["picture"]);
    }

    #[test]
    fn stages_before_the_start_values_are_not_run() {
        let sampled = run(Some(Role::Sample), Role::Decode, 1);
        assert_eq!(
            names(&plan(true), &sampled),
            ["text", "sample", "frames", "sound"]
        );
        let decoded = run(Some(Role::Decode), Role::Decode, 1);
        assert_eq!(names(&plan(true), &decoded), ["frames", "sound"]);
    }

    /// Two sections; the second decode takes a value that the first leaves.
    fn sections() -> Vec<StagePlan> {
        let section = |number: u32, stage: StagePlan| StagePlan {
            section: Some(model::Section { number, of: 2 }),
            shared: None,
            reads_media: true,
            ..stage
        };
        vec![
            stage("text", Role::Encode, &[], &["text"], false),
            section(1, stage("sample1", Role::Sample, &["text"], &["s1"], true)),
            section(1, stage("decode1", Role::Decode, &["s1"], &["left"], true)),
            section(2, stage("sample2", Role::Sample, &["text", "s1"], &["s2"], true)),
            section(
                2,
                stage("decode2", Role::Decode, &["s1", "s2", "left"], &[], true),
            ),
        ]
    }

    #[test]
    fn each_section_is_decoded_after_it_is_sampled_under_every_policy() {
        let plan = sections();
        for policy in [Policy::Shared, Policy::Exclusive] {
            let steps = steps_of(&plan, &run(None, Role::Decode, 1), policy);
            let stages: Vec<JobStepKind> = steps.iter().map(|step| step.kind).collect();
            assert_eq!(stages, [0, 1, 2, 3, 4].map(JobStepKind::Stage));
        }
    }

    #[test]
    fn the_latent_of_a_film_in_sections_excludes_values_passed_between_decodes() {
        let plan = sections();
        let names_of: Vec<&str> = decodable(&plan).iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names_of, ["s1", "s2"]);
        assert_eq!(
            names(&plan, &run(None, Role::Sample, 1)),
            ["text", "sample1", "sample2"]
        );
        assert_eq!(
            names(&plan, &run(Some(Role::Decode), Role::Decode, 1)),
            ["decode1", "decode2"]
        );
    }

    /// As it was before the last needs were kept: all that any later stage names.
    fn needed_later_by_search(steps: &[JobStep], plan: &[StagePlan], index: usize) -> Vec<String> {
        let later = steps.iter().skip(index + 1).filter_map(|step| match step.kind {
            JobStepKind::Stage(stage) => plan.get(stage),
            JobStepKind::Load(_) | JobStepKind::Unload(_) => None,
        });
        let mut names: Vec<String> = later.flat_map(|stage| stage.components.clone()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    #[test]
    fn components_needed_after_a_step_are_those_of_later_stages() {
        let mut plan = plan(false);
        for (stage, names) in plan.iter_mut().zip(["te", "va", "tr lo", "va", "va so"]) {
            stage.components = names.split(' ').map(str::to_owned).collect();
        }
        let plans = BTreeMap::from([("f32".to_owned(), plan.clone())]);
        let run = run(None, Role::Decode, 3);
        for policy in [Policy::Shared, Policy::Exclusive] {
            let mut steps = JobSteps::new(steps_of_load(&plan, Some(&run), true, policy), &plans);
            for unload_before in [None, Some(0), Some(2), Some(steps.len() + 1)] {
                if let Some(index) = unload_before {
                    steps.unload_before(index, Model::Replaced);
                    assert!(steps[index].is_unload());
                }
                for index in 0..steps.len() {
                    let needed: Vec<&String> = steps.needed_later(index, "f32").collect();
                    assert_eq!(
                        needed,
                        Vec::from_iter(&needed_later_by_search(&steps, &plan, index))
                    );
                }
            }
            assert_eq!(
                steps.needed_later(0, "bf16").count(),
                0,
                "it was not opened for that"
            );
        }
    }

    #[test]
    fn shared_stages_run_once_and_the_exclusive_policy_decodes_last() {
        let plan = plan(false);
        let order = |policy| -> Vec<String> {
            let steps = steps_of(&plan, &run(None, Role::Decode, 2), policy);
            let words = steps.iter().map(|step| match step.kind {
                JobStepKind::Stage(stage) => format!("{}{}", plan[stage].name, step.item),
                other => format!("{other:?}"),
            });
            words.collect()
        };
        let by_item = [
            "text0", "sample0", "frames0", "sound0", "sample1", "frames1", "sound1",
        ];
        assert_eq!(order(Policy::Shared), by_item);
        let by_role = [
            "text0", "sample0", "sample1", "frames0", "sound0", "frames1", "sound1",
        ];
        assert_eq!(order(Policy::Exclusive), by_role);
    }
}
