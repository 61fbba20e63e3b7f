//! Stages of several jobs in one order: which jobs share a pass, and how each ends.

use std::time::Duration;

use engine::Error;
use engine::JobState;
use engine::job::{JobEventKind, JobSpec};
use engine::messages::{Command, Failure, Order, Outcome, Progress, Work};
use residency::{Bytes, ComponentId};
use tokio::time::Instant;

use crate::fixture::{
    COPY, SCRATCH_EACH, SCRATCH_OF_SET, component_of, image_of, picture, run_of, with_adapters, with_formats,
};
use crate::worker::{
    Wire, Worker, at_rest, cancelled_by, completed, end, events, needs, one_card, settle, stage_of,
};

/// A picture that is sampled in as many rounds as slots.
pub fn in_rounds(slots: u32, client: &str, prompt: &str) -> JobSpec {
    let mut spec = picture("a", client, prompt);
    run_of(&mut spec).request.slots = slots;
    spec
}

/// The jobs of an order, with the round that each is in, from 1.
pub fn rounds(order: &Order) -> Vec<(String, usize)> {
    let round = |gives: &[String]| match gives[0].strip_prefix("state_") {
        Some(round) => round.parse().unwrap(),
        None => 9, // the last
    };
    let Work::Stage(own) = &order.work else {
        panic!("{order:?}")
    };
    let sharing = order
        .sharing
        .iter()
        .map(|s| (s.job.clone(), round(&s.work.plan.gives)));
    std::iter::once((order.job.clone(), round(&own.plan.gives)))
        .chain(sharing)
        .collect()
}

/// Runs orders up to a denoising, which is returned.
async fn denoise(worker: &mut Worker) -> Order {
    loop {
        let order = worker.order().await;
        if stage_of(&order) == "denoise" {
            return order;
        }
        worker.complete(&order);
    }
}

#[tokio::test(start_paused = true)]
async fn jobs_join_a_shared_pass_at_any_round() {
    let (queue, mut worker) = one_card().await;
    let mut first = queue.submit(in_rounds(3, "me", "one")).await.unwrap();
    let order = denoise(&mut worker).await;
    assert_eq!(rounds(&order), [(first.id.to_string(), 1)]);
    let mut second = queue.submit(in_rounds(3, "me", "two")).await.unwrap();
    settle().await;
    worker.complete(&order);
    let encode = worker.order().await;
    assert_eq!(
        stage_of(&encode),
        "encode_text",
        "the second is got ready before the next round"
    );
    worker.complete(&encode);
    let order = worker.order().await;
    assert_eq!(
        rounds(&order),
        [(first.id.to_string(), 2), (second.id.to_string(), 1)]
    );
    let scratch = needs(&order).1[0].scratch;
    assert_eq!(scratch, Bytes::gib(1) + SCRATCH_EACH, "memory for both");
    worker.complete(&order);
    let order = worker.order().await;
    let mut third = queue.submit(in_rounds(3, "me", "one")).await.unwrap();
    settle().await;
    // Its text is known, so it needs no stage of its own before it joins.
    let expected = [(first.id.to_string(), 9), (second.id.to_string(), 2)];
    assert_eq!(rounds(&order), expected, "it came when the order was out");
    worker.complete(&order);
    let order = denoise(&mut worker).await;
    let expected = [(second.id.to_string(), 9), (third.id.to_string(), 1)];
    assert_eq!(rounds(&order), expected, "the first is decoded meanwhile");
    worker.complete(&order);
    while worker.try_work().await {}
    for job in [&mut first, &mut second, &mut third] {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

/// What a round has kept is in no peak of the next one.
#[tokio::test(start_paused = true)]
async fn a_shared_pass_has_the_memory_that_was_predicted_however_little_its_rounds_allocated() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for prompt in ["one", "two"] {
        let mut spec = in_rounds(16, "me", prompt);
        run_of(&mut spec).request.steps = 16;
        jobs.push(queue.submit(spec).await.unwrap());
    }
    let mut shared = 0;
    while shared < 15 {
        let order = denoise(&mut worker).await;
        if !order.sharing.is_empty() {
            shared += 1;
            let scratch = needs(&order).1[0].scratch;
            assert_eq!(scratch, Bytes::gib(1) + SCRATCH_EACH, "round {shared}");
        }
        worker.complete(&order);
    }
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn jobs_encode_ahead_only_up_to_the_slots_of_a_pass() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for n in 0..4 {
        jobs.push(
            queue
                .submit(in_rounds(2, "me", &format!("prompt {n}")))
                .await
                .unwrap(),
        );
    }
    let mut stages = Vec::new();
    for _ in 0..6 {
        let order = worker.order().await;
        stages.push((stage_of(&order), 1 + order.sharing.len()));
        worker.complete(&order);
    }
    let first = [
        ("encode_text", 1),
        ("encode_text", 1),
        ("denoise", 2),
        ("denoise", 2),
    ];
    assert_eq!(stages, [&first[..], &[("decode", 1), ("decode", 1)]].concat());
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_pass_is_shared_up_to_the_slots_and_only_by_equal_sizes() {
    let (queue, mut worker) = one_card().await;
    let mut other_size = in_rounds(2, "me", "one");
    image_of(&mut other_size).width = 512;
    let specs = [
        in_rounds(2, "me", "one"),
        other_size,
        in_rounds(2, "me", "one"),
        in_rounds(2, "me", "one"),
        picture("a", "me", "one"),
    ];
    let mut jobs = Vec::new();
    for spec in specs {
        jobs.push(queue.submit(spec).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    let expected = [(jobs[0].id.to_string(), 1), (jobs[2].id.to_string(), 1)];
    assert_eq!(rounds(&order), expected);
    worker.complete(&order);
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn fewer_jobs_share_a_pass_if_memory_is_short() {
    let (queue, mut worker) = one_card().await;
    // The transformer has 12 of 24 GiB, one stage's scratch 1, each further one 1.
    worker.set_foreign(Bytes::gib(10));
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(queue.submit(in_rounds(3, "me", "one")).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    assert_eq!(order.sharing.len(), 1, "2 GiB are there besides");
    worker.complete(&order);
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

/// Two jobs that share an order.
async fn two() -> (
    engine::queue::Queue,
    Worker,
    engine::queue::Job,
    engine::queue::Job,
    Order,
) {
    let (queue, mut worker) = one_card().await;
    let first = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    let second = queue.submit(in_rounds(2, "me", "one")).await.unwrap();
    let order = denoise(&mut worker).await;
    assert_eq!(order.sharing.len(), 1);
    worker.begin(&order).unwrap();
    (queue, worker, first, second, order)
}

#[tokio::test(start_paused = true)]
async fn a_stage_failure_ends_only_its_own_job_in_a_shared_pass() {
    let (queue, mut worker, mut first, mut second, order) = two().await;
    let failure = Failure::NotFinite {
        component: "transformer".into(),
        step: 1,
    };
    worker.finish(order.sharing[0].ticket, Outcome::Failed(failure));
    worker.finish(order.ticket, completed(&order, Vec::new()));
    assert!(matches!(
        end(&mut second).await,
        Err(Error::NotFinite { step: 1, .. })
    ));
    while worker.try_work().await {}
    end(&mut first).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn jobs_of_a_failed_shared_pass_are_run_again_alone() {
    let (queue, mut worker, mut first, mut second, order) = two().await;
    let failure = || {
        Outcome::Failed(Failure::OutOfMemory {
            stage: "denoise".into(),
            needed: Bytes::gib(14),
            usable: Bytes::gib(13),
            holders: Vec::new(),
        })
    };
    worker.finish(order.sharing[0].ticket, failure());
    worker.finish(order.ticket, failure());
    for expected in [(&first, 1), (&first, 9), (&second, 1), (&second, 9)] {
        let mut order = worker.order().await;
        if stage_of(&order) == "decode" {
            worker.complete(&order);
            order = worker.order().await;
        }
        assert_eq!(rounds(&order), [(expected.0.id.to_string(), expected.1)]);
        worker.complete(&order);
    }
    while worker.try_work().await {}
    end(&mut first).await.unwrap();
    end(&mut second).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_death_is_not_counted_against_jobs_that_shared_the_pass() {
    let (queue, mut worker, mut first, mut second, _) = two().await;
    worker.die();
    settle().await;
    worker.ready();
    let killer = worker.order().await;
    assert_eq!(rounds(&killer), [(first.id.to_string(), 1)], "alone");
    worker.begin(&killer).unwrap();
    worker.die();
    settle().await;
    assert!(matches!(
        end(&mut first).await,
        Err(Error::WorkerDied { deaths: 2, .. })
    ));
    worker.ready();
    let order = worker.order().await;
    assert_eq!(rounds(&order), [(second.id.to_string(), 1)]);
    worker.complete(&order);
    while worker.try_work().await {}
    end(&mut second).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_job_leaves_a_shared_pass_and_the_others_finish() {
    for own in [true, false] {
        let (queue, mut worker, mut first, mut second, order) = two().await;
        let (gone, stays) = if own {
            (&mut first, &mut second)
        } else {
            (&mut second, &mut first)
        };
        let ticket = if own {
            order.ticket
        } else {
            order.sharing[0].ticket
        };
        queue.cancel(&gone.id, "ann".to_owned()).await.unwrap();
        let told = worker.next().await;
        assert!(matches!(told, Wire::Command(Command::Cancel(cancelled)) if cancelled == ticket));
        // The worker may compute the others for longer than a cancel usually takes.
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert!(worker.receives_no_command().await, "it is not taken for hung");
        let finished = |cancelled: bool| match cancelled {
            true => Outcome::Cancelled,
            false => completed(&order, Vec::new()),
        };
        worker.finish(order.sharing[0].ticket, finished(!own));
        worker.finish(order.ticket, finished(own));
        assert_eq!(end(gone).await, Err(cancelled_by("ann")));
        while worker.try_work().await {}
        end(stays).await.unwrap();
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_continues_a_pass_of_cancelled_jobs_counts_as_hung() {
    let (queue, mut worker, mut first, mut second, order) = two().await;
    for n in 1..=2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        worker.progress(order.ticket, Progress::Step { n, of: 4 });
    }
    for job in [&first, &second] {
        queue.cancel(&job.id, "ann".to_owned()).await.unwrap();
        assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    }
    let before = Instant::now();
    let reason = worker.recycled().await;
    assert_eq!(before.elapsed().as_secs(), 2, "{reason}");
    worker.die();
    for job in [&mut first, &mut second] {
        assert_eq!(end(job).await, Err(cancelled_by("ann")));
    }
    worker.ready();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_cancel_of_the_rest_of_a_pass_is_answered_in_the_time_of_a_cancel() {
    let (queue, mut worker, mut first, mut second, order) = two().await;
    for n in 1..=2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        worker.progress(order.ticket, Progress::Step { n, of: 4 });
    }
    queue.cancel(&first.id, "ann".to_owned()).await.unwrap();
    assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    assert!(worker.receives_no_command().await);
    let before = Instant::now();
    worker.finish(order.sharing[0].ticket, completed(&order, Vec::new()));
    let reason = worker.recycled().await;
    assert_eq!(before.elapsed().as_secs(), 2, "{reason}");
    worker.die();
    assert_eq!(end(&mut first).await, Err(cancelled_by("ann")));
    worker.ready();
    while worker.try_work().await {}
    end(&mut second).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn each_job_of_a_shared_pass_gets_its_own_steps() {
    let (queue, mut worker, mut first, mut second, order) = two().await;
    worker.progress(order.ticket, Progress::Step { n: 3, of: 4 });
    worker.progress(order.sharing[0].ticket, Progress::Step { n: 1, of: 4 });
    worker.complete(&order);
    while worker.try_work().await {}
    for (job, expected) in [(&mut first, 3), (&mut second, 1)] {
        let steps = events(job).await.into_iter().filter_map(|event| match event {
            JobEventKind::Step { n, .. } => Some(n),
            _ => None,
        });
        assert_eq!(steps.collect::<Vec<_>>(), [expected]);
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_with_endless_rounds_does_not_starve_others() {
    let (queue, mut worker) = one_card().await;
    let mut session = Vec::new();
    for _ in 0..8 {
        session.push(queue.submit(in_rounds(3, "session", "one")).await.unwrap());
    }
    let mut order = denoise(&mut worker).await;
    let mut other = queue.submit(picture("a", "other", "a cat")).await.unwrap();
    settle().await;
    let (mut orders, mut of_other) = (0, 0);
    while of_other < 3 {
        orders += 1;
        assert!(orders < 20, "the other has run {of_other} stages of 3");
        // What each takes is little beside what a warm job may be preferred for; as soon as one is done the session asks for
        // the next.
        tokio::time::sleep(Duration::from_millis(20)).await;
        of_other += usize::from(order.job == other.id.to_string());
        worker.complete(&order);
        settle().await;
        let ended = queue
            .jobs(true)
            .await
            .iter()
            .filter(|job| job.state == JobState::Done)
            .count();
        while session.len() < 8 + ended {
            session.push(queue.submit(in_rounds(3, "session", "one")).await.unwrap());
        }
        if of_other < 3 {
            order = worker.order().await;
        }
    }
    while worker.try_work().await {}
    end(&mut other).await.unwrap();
    for job in &mut session {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_counts_only_the_scratch_of_its_own_job() {
    let (queue, ..) = two().await;
    let plan = queue.plan(in_rounds(2, "me", "one"), "").await.unwrap();
    let scratch: Vec<Bytes> = plan.stages.iter().map(|stage| stage.scratch).collect();
    assert_eq!(scratch[1], Bytes::gib(1), "{scratch:?}");
}

/// A picture that is sampled in as many rounds as slots, with adapters.
fn adapted(slots: u32, client: &str, adapters: &[&str]) -> JobSpec {
    with_adapters(in_rounds(slots, client, "one"), adapters)
}

/// The names of the components of an order's own work.
fn components(order: &Order) -> Vec<String> {
    let (components, _) = needs(order);
    components
        .iter()
        .map(|component| component.name.clone())
        .collect()
}

/// The names of the adapters of an order's model.
fn adapters(order: &Order) -> Vec<&str> {
    let adapters = order.model.adapters.iter();
    adapters.map(|adapter| adapter.name.as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn jobs_with_different_adapters_of_one_base_share_a_pass() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for (client, names) in [("one", &[][..]), ("two", &["oil", "ink"]), ("three", &["chalk"])] {
        jobs.push(queue.submit(adapted(3, client, names)).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    let expected: Vec<_> = jobs.iter().map(|job| (job.id.to_string(), 1)).collect();
    assert_eq!(rounds(&order), expected);
    // The model of the order has the adapters of all, and its work their components, each once.
    assert_eq!(adapters(&order), ["chalk", "ink", "oil"]);
    let all = ["oil", "ink", "chalk"].map(component_of);
    assert_eq!(
        components(&order),
        [&["transformer".to_owned()][..], &all].concat()
    );
    let Work::Stage(work) = &order.work else {
        panic!("{order:?}")
    };
    assert_eq!(work.plan.components, components(&order));
    let ids: Vec<&ComponentId> = order.components.iter().collect();
    assert!(ids.is_sorted() && ids.len() == 6, "{ids:?}");
    let scratch = work.plan.rungs[0].scratch;
    let of_sets = SCRATCH_OF_SET + SCRATCH_OF_SET + SCRATCH_OF_SET;
    assert_eq!(scratch, Bytes::gib(1) + SCRATCH_EACH + SCRATCH_EACH + of_sets);
    let shared = order.sharing.iter().map(|sharing| sharing.work.components.len());
    assert_eq!(shared.collect::<Vec<_>>(), [3, 2], "each has its own");
    worker.complete(&order);
    let again = worker.order().await;
    assert_eq!(rounds(&again).len(), 3);
    worker.complete(&again);
    while worker.try_work().await {}
    for job in &mut jobs {
        let Some(JobEventKind::Done(report)) = events(job).await.pop() else {
            panic!("it failed")
        };
        let others = report
            .resident_already
            .iter()
            .filter(|name| name.starts_with("adapter:"));
        let own: &[String] = match job.id {
            ref id if *id.to_string() == expected[1].0 => &all[..2],
            ref id if *id.to_string() == expected[2].0 => &all[2..],
            _ => &[],
        };
        assert!(
            others.eq(own),
            "no job is told of the adapters of others: {report:?}"
        );
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_pass_keeps_copies_of_weights_for_each_set_where_memory_is_free() {
    // The transformer has 12 of 24 GiB, each adapter 1, the activations of three with their sets 3.75, and the copies 3 more: they never
    // keep a job out of the pass.
    for foreign in [1, 5] {
        let (queue, mut worker) = one_card().await;
        worker.set_foreign(Bytes::gib(foreign));
        let mut jobs = Vec::new();
        for names in [&["copied"][..], &["copied too"], &["plain"]] {
            jobs.push(queue.submit(adapted(3, "me", names)).await.unwrap());
        }
        let order = denoise(&mut worker).await;
        assert_eq!(rounds(&order).len(), 3, "{foreign}");
        let Work::Stage(work) = &order.work else {
            panic!("{order:?}")
        };
        let [with_copies, whole] = &work.plan.rungs[..] else {
            panic!("{:?}", work.plan.rungs)
        };
        assert_eq!(with_copies.copies, ["layer"], "once, for all sets");
        assert_eq!(with_copies.scratch, whole.scratch + COPY + COPY + COPY);
        assert!(whole.copies.is_empty());
        worker.complete(&order);
        while worker.try_work().await {}
        for job in &mut jobs {
            end(job).await.unwrap();
        }
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pass_has_four_sets_of_adapters_at_most() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for names in [&["a"][..], &["b"], &["c"], &["d"], &["e"], &["b"]] {
        jobs.push(queue.submit(adapted(8, "me", names)).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    assert_eq!(adapters(&order), ["a", "b", "c", "d"]);
    let expected = [0, 1, 2, 3, 5].map(|number: usize| (jobs[number].id.to_string(), 1));
    assert_eq!(
        rounds(&order),
        expected,
        "the fifth set waits, another of a set joins"
    );
    worker.complete(&order);
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn fewer_jobs_share_a_pass_if_their_adapters_do_not_fit() {
    // The transformer has 12 of 24 GiB, each adapter 1, and the activations of three with their sets 3.75.
    for (foreign, together) in [(5, 3), (7, 2), (9, 1)] {
        let (queue, mut worker) = one_card().await;
        worker.set_foreign(Bytes::gib(foreign));
        let mut jobs = Vec::new();
        for name in ["a", "b", "c"] {
            jobs.push(queue.submit(adapted(3, "me", &[name])).await.unwrap());
        }
        let order = denoise(&mut worker).await;
        assert_eq!(rounds(&order).len(), together, "{foreign}");
        assert_eq!(components(&order).len(), 1 + together);
        worker.complete(&order);
        while worker.try_work().await {}
        for job in &mut jobs {
            end(job).await.unwrap();
        }
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn jobs_of_other_bases_or_versions_of_an_adapter_share_no_pass() {
    let (queue, mut worker) = one_card().await;
    let mut other_file = adapted(4, "me", &["ink"]);
    let mut entry = (*other_file.entry).clone();
    entry.adapters[0].path = "/adapters/elsewhere/ink".into();
    other_file.entry = entry.into();
    let specs = [
        adapted(4, "me", &["ink"]),
        other_file,
        with_formats(in_rounds(4, "me", "one"), &[("transformer", "nf4")]),
        adapted(4, "me", &["oil"]),
    ];
    let mut jobs = Vec::new();
    for spec in specs {
        jobs.push(queue.submit(spec).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    let expected = [(jobs[0].id.to_string(), 1), (jobs[3].id.to_string(), 1)];
    assert_eq!(rounds(&order), expected);
    worker.complete(&order);
    while worker.try_work().await {}
    for job in &mut jobs {
        end(job).await.unwrap();
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_damaged_adapter_ends_only_its_own_job() {
    let (queue, mut worker) = one_card().await;
    let mut jobs = Vec::new();
    for name in ["ink", "gone"] {
        jobs.push(queue.submit(adapted(2, "me", &[name])).await.unwrap());
    }
    let order = denoise(&mut worker).await;
    assert_eq!(adapters(&order), ["gone", "ink"]);
    let failure = || {
        let message = "gone cannot be read".to_owned();
        Outcome::Failed(Failure::Model { message })
    };
    worker.finish(order.sharing[0].ticket, failure());
    worker.finish(order.ticket, failure());
    let mut alone = Vec::new();
    loop {
        settle().await;
        let Some(Wire::Command(Command::Run(order))) = worker.try_next() else {
            break;
        };
        if stage_of(&order) == "denoise" {
            alone.push((adapters(&order).join(","), rounds(&order).len()));
        }
        match adapters(&order)[..] {
            ["gone"] => worker.finish(order.ticket, failure()),
            _ => worker.complete(&order),
        }
    }
    let expected = [("ink", 1), ("ink", 1), ("gone", 1)];
    assert_eq!(alone, expected.map(|(name, jobs)| (name.to_owned(), jobs)));
    end(&mut jobs[0]).await.unwrap();
    assert!(matches!(end(&mut jobs[1]).await, Err(Error::ModelDamaged(_))));
    at_rest(&queue).await;
}
