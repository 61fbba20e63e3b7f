//! The normal flow of jobs.

use std::time::Duration;

use engine::job::{JobEventKind, JobSpec, Reach};
use engine::messages::{Command, Outcome, Work};
use engine::queue::{Settings, StageVerdict};
use engine::{ChangedTo, Error};
use model::{Image, InitImage, Mask, Role};
use residency::{Bytes, Policy, WaitCause};

use crate::fixture::{EACH_ITEM, REDUCTIONS, brought, decode, entry, image_of, picture, run_of};
use crate::worker::{
    Wire, at_rest, cancelled_by, completed, end, events, exclusive, one_card, one_card_with, settle,
    stage_of, start,
};

fn names(events: &[JobEventKind]) -> Vec<String> {
    let name = |event: &JobEventKind| match event {
        JobEventKind::Accepted { joined } => format!("accepted {joined}"),
        JobEventKind::Stage {
            name,
            index,
            of,
            cached,
            ..
        } => format!("{name} {index}/{of} {cached}"),
        JobEventKind::Piece {
            item: picture, seed, ..
        } => format!("picture {picture} seed {seed}"),
        JobEventKind::Latent { item: picture, .. } => format!("latent {picture}"),
        JobEventKind::Done(_) => "done".into(),
        JobEventKind::Failed(error) => format!("failed: {error}"),
        JobEventKind::Retrying { reason, stage, .. } => format!("retrying {reason} {stage}"),
        _ => String::new(),
    };
    events.iter().map(name).filter(|name| !name.is_empty()).collect()
}

#[tokio::test(start_paused = true)]
async fn a_job_runs_all_stages_and_equal_prompts_are_encoded_once() {
    let (queue, mut worker) = one_card().await;
    let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    for expected in ["encode_text", "denoise", "decode"] {
        assert_eq!(worker.work(10).await.1, expected);
    }
    let seen = events(&mut job).await;
    let expected = [
        "accepted false",
        "encode_text 1/3 false",
        "denoise 2/3 false",
        "decode 3/3 false",
        "picture 0 seed 7",
        "done",
    ];
    assert_eq!(names(&seen), expected);
    let Some(JobEventKind::Done(report)) = seen.last() else {
        panic!()
    };
    assert_eq!((report.seed, report.stages.len()), (7, 3));
    assert_eq!(report.stages[1].run, Duration::from_millis(100));
    let attention: Vec<&str> = report.stages.iter().map(|stage| &*stage.attention).collect();
    assert_eq!(attention, ["own kernels"; 3]);

    let mut again = queue.submit(picture("a", "me", "a cat")).await.unwrap();
    assert_eq!(worker.work(10).await.1, "denoise");
    assert_eq!(worker.work(10).await.1, "decode");
    let expected = [
        "accepted false",
        "encode_text 1/3 true",
        "denoise 2/3 false",
        "decode 3/3 false",
        "picture 0 seed 7",
        "done",
    ];
    let seen = events(&mut again).await;
    assert_eq!(names(&seen), expected);
    let Some(JobEventKind::Done(report)) = seen.last() else {
        panic!()
    };
    assert_eq!(report.stages[0].attention, "", "it was cached: nothing computed");
    at_rest(&queue).await;
    let status = queue.status().borrow().clone();
    assert_eq!(
        (status.latents, status.texts),
        (0, 1),
        "a latent that nobody was told of is gone"
    );
}

#[tokio::test(start_paused = true)]
async fn without_a_text_cache_nothing_tells_that_a_prompt_was_used_before() {
    let (queue, mut worker) = one_card_with(Settings {
        text_cache: Bytes::ZERO,
        ..Settings::default()
    })
    .await;
    for account in ["alice", "bob"] {
        let mut spec = picture("a", "me", "a cat");
        spec.options.account = account.to_owned();
        let mut job = queue.submit(spec).await.unwrap();
        for expected in ["encode_text", "denoise", "decode"] {
            assert_eq!(worker.work(10).await.1, expected);
        }
        let seen = names(&events(&mut job).await);
        assert!(seen.contains(&"encode_text 1/3 false".to_owned()), "{seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn values_of_an_item_are_not_reused_for_another() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", EACH_ITEM);
    run_of(&mut spec).count = 2;
    let mut job = queue.submit(spec).await.unwrap();
    for expected in ["encode_text", "denoise", "decode"].repeat(2) {
        assert_eq!(worker.work(10).await.1, expected);
    }
    assert!(matches!(
        events(&mut job).await.last(),
        Some(JobEventKind::Done(_))
    ));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn approximate_values_are_not_cached_for_other_jobs() {
    let (queue, mut worker) = one_card().await;
    for _ in 0..2 {
        let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
        let order = worker.order().await;
        assert_eq!(stage_of(&order), "encode_text");
        let resident = worker.begin(&order).unwrap();
        let Outcome::Completed(mut approximate) = completed(&order, resident) else {
            panic!("it completes")
        };
        approximate.approximate = true;
        worker.finish(order.ticket, Outcome::Completed(approximate));
        for expected in ["denoise", "decode"] {
            assert_eq!(worker.work(10).await.1, expected);
        }
        let seen = events(&mut job).await;
        let Some(JobEventKind::Done(report)) = seen.last() else {
            panic!()
        };
        assert_eq!(report.approximations, ["encode_text in whole"]);
    }
    at_rest(&queue).await;
    assert_eq!(queue.status().borrow().texts, 0);
}

#[tokio::test(start_paused = true)]
async fn decoding_a_latent_of_a_masked_job_reports_the_missing_pixels() {
    let (queue, mut worker) = one_card().await;
    for (masked, lacks) in [(false, 0), (true, 1)] {
        let mut spec = picture("a", "me", "a cat");
        let image = image_of(&mut spec);
        image.init_image = Some(InitImage {
            width: 1024,
            height: 1024,
            rgb: vec![0; 3 << 20].into(),
        });
        image.mask = masked.then(|| Mask {
            width: 1024,
            height: 1024,
            grey: vec![0; 1 << 20].into(),
        });
        run_of(&mut spec).keep_latent = true;
        let mut job = queue.submit(spec).await.unwrap();
        while worker.try_work().await {}
        let seen = events(&mut job).await;
        let kept = seen.iter().find_map(|kind| match kind {
            JobEventKind::Latent { info, .. } => Some(info),
            _ => None,
        });
        let kept = kept.unwrap();
        assert_eq!(kept.approximation.is_some(), masked);
        let Some(JobEventKind::Done(report)) = seen.last() else {
            panic!()
        };
        assert!(
            report.approximations.is_empty(),
            "the job's own picture has it all"
        );
        let later = JobSpec {
            work: decode(&kept.id),
            ..picture("a", "me", "")
        };
        let mut later = queue.submit(later).await.unwrap();
        while worker.try_work().await {}
        let seen = events(&mut later).await;
        let Some(JobEventKind::Done(report)) = seen.last() else {
            panic!("{seen:?}")
        };
        assert_eq!(report.approximations.len(), lacks, "{:?}", report.approximations);
        queue.release_latent(&kept.id).await;
    }
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_the_data_of_its_pictures_is_planned_and_not_run() {
    let (queue, _worker) = one_card().await;
    let mut spec = picture("a", "me", "a cat");
    image_of(&mut spec).init_image = Some(InitImage::of_size((1024, 1024)));
    assert!(queue.plan_as_asked(spec.clone(), "").await.unwrap().fits);
    let refused = queue.submit(spec).await.err();
    assert!(matches!(refused, Some(engine::Error::Internal(_))), "{refused:?}");
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn several_pictures_are_decoded_in_the_order_of_the_policy() {
    for (policy, expected) in [
        (
            Policy::Shared,
            ["encode_text", "denoise", "decode", "denoise", "decode"],
        ),
        (
            Policy::Exclusive,
            ["encode_text", "denoise", "denoise", "decode", "decode"],
        ),
    ] {
        let (queue, mut worker) = one_card_with(Settings {
            policy: Some(policy),
            ..exclusive()
        })
        .await;
        let mut spec = picture("a", "me", "two cats");
        let generate = run_of(&mut spec);
        generate.count = 2;
        let mut job = queue.submit(spec).await.unwrap();
        let mut seeds = Vec::new();
        for expected in expected {
            let order = worker.order().await;
            assert_eq!(stage_of(&order), expected);
            if let Work::Stage(stage) = &order.work {
                seeds.push(stage.request.seed);
            }
            worker.complete(&order);
        }
        assert!(seeds.contains(&7) && seeds.contains(&8));
        let pictures = names(&events(&mut job).await);
        assert!(
            pictures.contains(&"picture 0 seed 7".to_owned())
                && pictures.contains(&"picture 1 seed 8".to_owned())
        );
        at_rest(&queue).await;
    }
}

#[tokio::test(start_paused = true)]
async fn learned_peaks_replace_predictions() {
    let (queue, mut worker) = one_card().await;
    for expected in [Bytes::gib(1), Bytes(1 << 29) + Bytes(1 << 24) + Bytes::mib(16)] {
        let mut job = queue.submit(picture("a", "me", "a cat")).await.unwrap();
        let mut order = worker.order().await;
        while stage_of(&order) != "denoise" {
            worker.complete(&order);
            order = worker.order().await;
        }
        let Work::Stage(stage) = &order.work else { panic!() };
        assert_eq!(stage.plan.rungs[0].scratch, expected);
        worker.complete(&order);
        worker.work(1).await;
        end(&mut job).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_deleted_latent_stays_for_jobs_that_need_it() {
    // The job itself, which has denoised and decodes last: the client has the latent's handle before that.
    let (queue, mut worker) = one_card_with(Settings {
        policy: Some(Policy::Exclusive),
        ..exclusive()
    })
    .await;
    let mut spec = picture("a", "me", "a cat");
    let generate = run_of(&mut spec);
    generate.keep_latent = true;
    generate.count = 2;
    let mut job = queue.submit(spec).await.unwrap();
    worker.work(1).await;
    let denoise = worker.order().await;
    worker.complete(&denoise);
    let id = loop {
        if let JobEventKind::Latent { info, .. } = job.next().await.unwrap().kind {
            break info.id;
        }
    };
    assert!(queue.release_latent(&id).await);
    assert!(!queue.release_latent(&id).await, "once");
    assert!(matches!(queue.latent(&id).await, Err(Error::LatentNotFound(_))));
    for expected in ["denoise", "decode", "decode"] {
        let order = worker.order().await;
        assert_eq!(stage_of(&order), expected);
        if let (Work::Stage(stage), "decode") = (&order.work, expected) {
            assert!(stage.values.contains_key("latent"));
        }
        worker.complete(&order);
    }
    let seen = names(&events(&mut job).await);
    assert_eq!(seen.last().unwrap(), "done", "{seen:?}");
    at_rest(&queue).await;
    assert_eq!(queue.status_now().await.latents, 1, "the second picture's");

    // A job that is queued after another.
    let brought = queue
        .put_latent(brought(), "path:/a#vae".into(), String::new())
        .await
        .unwrap();
    let mut running = queue.submit(picture("a", "me", "a dog")).await.unwrap();
    let busy = worker.order().await;
    let mut spec = picture("a", "me", "");
    spec.work = decode(&brought.id);
    let mut queued = queue.submit(spec.clone()).await.unwrap();
    assert!(queue.release_latent(&brought.id).await);
    assert!(matches!(queue.submit(spec).await, Err(Error::LatentNotFound(_))));
    worker.complete(&busy);
    for _ in 0..3 {
        let order = worker.order().await;
        worker.complete(&order);
    }
    for job in [&mut running, &mut queued] {
        let seen = names(&events(job).await);
        assert_eq!(seen.last().unwrap(), "done", "{seen:?}");
    }
    at_rest(&queue).await;
    assert_eq!(queue.status_now().await.latents, 1, "gone with its job");
    assert!(!queue.release_latent("latent-none").await);
}

#[tokio::test(start_paused = true)]
async fn a_discarded_job_leaves_no_latents() {
    let (queue, mut worker) = one_card().await;
    let keeping = |prompt: &str| {
        let mut spec = picture("a", "me", prompt);
        let generate = run_of(&mut spec);
        (generate.keep_latent, generate.count) = (true, 2);
        spec
    };
    let brought = queue
        .put_latent(brought(), "path:/a#vae".into(), String::new())
        .await
        .unwrap();

    // While its second picture is denoised, by a worker that does not react to the cancellation earlier.
    let mut running = queue.submit(keeping("one")).await.unwrap();
    for expected in ["encode_text", "denoise", "decode"] {
        assert_eq!(worker.work(1).await.1, expected);
    }
    let second = worker.order().await;
    assert_eq!(stage_of(&second), "denoise");
    settle().await;
    assert_eq!(queue.status_now().await.latents, 2);
    assert!(queue.discard(&running.id, "ann".to_owned()).await.unwrap());
    assert!(matches!(worker.next().await, Wire::Command(Command::Cancel(_))));
    worker.complete(&second);
    assert_eq!(end(&mut running).await, Err(cancelled_by("ann")));
    assert_eq!(queue.status_now().await.latents, 1);

    // After it has ended, also without a cancellation.
    let mut ended = queue.submit(keeping("two")).await.unwrap();
    for _ in 0..5 {
        worker.work(1).await;
    }
    end(&mut ended).await.unwrap();
    assert_eq!(queue.status_now().await.latents, 3);
    assert!(!queue.cancel(&ended.id, "ann".to_owned()).await.unwrap());
    assert_eq!(queue.status_now().await.latents, 3);
    assert!(!queue.discard(&ended.id, "ann".to_owned()).await.unwrap());
    assert_eq!(queue.status_now().await.latents, 1, "what a client brought stays");
    assert!(queue.latent(&brought.id).await.is_ok());

    assert!(matches!(
        queue.discard("job-none", "ann".to_owned()).await,
        Err(Error::JobNotFound(_))
    ));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn latents_are_kept_encoded_and_decoded_on_request() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "a cat");
    let generate = run_of(&mut spec);
    generate.until = Role::Sample;
    let mut job = queue.submit(spec).await.unwrap();
    worker.work(1).await;
    worker.work(1).await;
    let seen = events(&mut job).await;
    assert_eq!(
        names(&seen)[1..],
        ["encode_text 1/2 false", "denoise 2/2 false", "latent 0", "done"]
    );
    let id = seen
        .iter()
        .find_map(|event| match event {
            JobEventKind::Latent { info, .. } => Some(info.id.clone()),
            _ => None,
        })
        .unwrap();

    let mut spec = picture("a", "me", "");
    spec.work = decode(&id);
    let mut job = queue.submit(spec.clone()).await.unwrap();
    let order = worker.order().await;
    let Work::Stage(stage) = &order.work else { panic!() };
    assert!(stage.values.contains_key("latent") && stage.request.medium.size() == Some((1024, 1024)));
    worker.complete(&order);
    assert_eq!(
        names(&events(&mut job).await)[1..],
        ["decode 1/1 false", "picture 0 seed 0", "done"]
    );

    spec.entry = crate::fixture::entry("b");
    assert!(
        matches!(queue.submit(spec.clone()).await, Err(Error::LatentMismatch(_))),
        "another VAE's"
    );
    spec.work = decode("latent-none");
    assert!(matches!(queue.submit(spec).await, Err(Error::LatentNotFound(_))));

    let latent = queue.latent(&id).await.unwrap();
    let brought = queue
        .put_latent(
            latent.values.clone(),
            latent.info.decoder_id.clone(),
            String::new(),
        )
        .await
        .unwrap();
    assert_ne!(brought.id, id);
    for nobody in ["", " "] {
        let refused = queue
            .put_latent(latent.values.clone(), nobody.into(), String::new())
            .await;
        assert_eq!(refused, Err(Error::LatentWithoutDecoder));
    }
    let mut wrong = latent.values;
    wrong.get_mut("latent").unwrap().shape[0] = 3;
    assert!(matches!(
        queue
            .put_latent(wrong, latent.info.decoder_id, String::new())
            .await,
        Err(Error::LatentMismatch(_))
    ));
    tokio::time::sleep(Duration::from_secs(601)).await;
    assert!(
        matches!(queue.latent(&id).await, Err(Error::LatentNotFound(_))),
        "its time is over"
    );
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_job_that_exceeds_the_card_is_refused_with_fallbacks() {
    let (queue, mut worker) = one_card().await;
    let mut spec = picture("a", "me", "a wall");
    *image_of(&mut spec) = Image::of(4096, 4096);
    let mut job = queue.submit(spec.clone()).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!()
    };
    assert_eq!(
        (shortfall.stage.as_str(), shortfall.needed),
        ("denoise", Bytes::gib(28))
    );
    let labels: Vec<&str> = shortfall
        .fallbacks
        .iter()
        .map(|fallback| fallback.change.label.as_str())
        .collect();
    assert_eq!(
        labels[REDUCTIONS.len()..],
        ["3072x3072", "2048x2048", "1024x1024"]
    );
    assert_eq!(labels[..REDUCTIONS.len()], REDUCTIONS);
    assert!(worker.receives_no_command().await);

    spec.options.allow_low_memory = true;
    let mut risky = queue.submit(spec).await.unwrap();
    worker.work(1).await;
    let order = worker.order().await;
    assert!(order.allow_low_memory && stage_of(&order) == "denoise");
    worker.deliver(&order);
    worker.finish(order.ticket, completed(&order, Vec::new()));
    worker.work(1).await;
    end(&mut risky).await.unwrap();
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn alternatives_are_planned_without_the_data_of_media() {
    let (queue, _worker) = one_card().await;
    let mut spec = picture("a", "me", "a wall");
    *image_of(&mut spec) = Image {
        init_image: Some(InitImage {
            rgb: vec![0; 3 << 24].into(),
            ..InitImage::of_size((4096, 4096))
        }),
        ..Image::of(4096, 4096)
    };
    let mut job = queue.submit(spec).await.unwrap();
    let Err(Error::NeverFits(shortfall)) = end(&mut job).await else {
        panic!()
    };
    let changes = shortfall.fallbacks.iter().map(|fallback| &fallback.change.to);
    let smaller = changes.filter_map(|change| match change {
        ChangedTo::Request(request) => Some(request.lacks_media_data()),
        _ => None,
    });
    assert_eq!(smaller.collect::<Vec<bool>>(), [true; 3]);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn damaged_models_and_invalid_fields_are_refused() {
    let (queue, _worker) = one_card().await;
    assert!(matches!(
        queue.submit(picture("broken", "me", "")).await,
        Err(Error::ModelDamaged(_))
    ));
    let mut spec = picture("a", "me", "");
    image_of(&mut spec).width = 0;
    assert!(matches!(queue.submit(spec).await, Err(Error::Invalid(_))));
    let (full, _worker) = one_card_with(Settings {
        max_jobs: 1,
        ..Settings::default()
    })
    .await;
    let _first = full.submit(picture("a", "me", "")).await.unwrap();
    assert!(matches!(
        full.submit(picture("a", "me", "")).await,
        Err(Error::QueueFull { limit: 1 })
    ));
}

#[tokio::test(start_paused = true)]
async fn jobs_wait_for_a_card_and_run_on_the_first_available() {
    let (queue, mut workers) = start(
        Settings {
            headroom: Bytes::ZERO,
            ..Settings::default()
        },
        2,
    );
    let mut cold = queue.submit(picture("a", "me", "one")).await.unwrap();
    let (mut second, mut first) = (workers.pop().unwrap(), workers.pop().unwrap());
    first.ready();
    for _ in 0..3 {
        first.work(10).await;
    }
    end(&mut cold).await.unwrap();
    second.ready();
    crate::worker::settle().await;
    let mut warm = queue.submit(picture("a", "me", "two")).await.unwrap();
    let order = first.order().await;
    assert!(
        second.receives_no_command().await,
        "the card that has the model is preferred"
    );
    let mut spec = picture("b", "me", "three");
    spec.options.card_hint = "sim:1".into();
    let mut beside = queue.submit(spec).await.unwrap();
    assert_eq!(
        second.order().await.job,
        beside.id.to_string(),
        "a hint is heeded"
    );
    let mut spec = picture("a", "me", "four");
    spec.options.card_hint = "sim:1".into();
    let hinted = queue.submit(spec).await.unwrap();
    first.complete(&order);
    first.work(1).await;
    first.work(1).await;
    end(&mut warm).await.unwrap();
    assert!(first.receives_no_command().await, "even where it means to wait");
    drop(hinted);
    queue.cancel(&beside.id, "ann".to_owned()).await.unwrap();
    second.die();
    assert_eq!(end(&mut beside).await, Err(cancelled_by("ann")));
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_is_a_dry_run() {
    let (queue, mut worker) = one_card().await;
    let plan = queue.plan(picture("a", "me", "a cat"), "").await.unwrap();
    assert!(plan.runs_now && plan.card == "sim:0" && plan.predicted_move_seconds > 3.0);
    let stages: Vec<_> = plan
        .stages
        .iter()
        .map(|stage| (stage.name.clone(), stage.moves.len()))
        .collect();
    let stages: Vec<_> = stages.iter().map(|(name, n)| (&**name, *n)).collect();
    assert_eq!(stages, [("encode_text", 1), ("denoise", 1), ("decode", 1)]);
    assert!(matches!(
        queue.plan(picture("a", "me", "a cat"), "sim:9").await,
        Err(Error::Invalid(_))
    ));
    worker.set_foreign(Bytes::gib(20));
    crate::worker::settle().await;
    let plan = queue.plan(picture("a", "me", "a cat"), "sim:0").await.unwrap();
    assert_eq!(plan.stages[1].verdict, StageVerdict::Wait(WaitCause::Foreign));
    assert!(plan.stages[1].shortfall.is_some() && !plan.runs_now && worker.receives_no_command().await);
    at_rest(&queue).await;
}

#[tokio::test(start_paused = true)]
async fn what_belongs_to_an_account_is_not_there_for_another() {
    let (queue, mut worker) = one_card().await;
    let of = |account: &str| queue.within(Reach::Own(account.to_owned()));
    let (alice, bob) = (of("alice"), of("bob"));
    let latent = queue
        .put_latent(brought(), "path:/a#vae".into(), "alice".into())
        .await
        .unwrap();
    assert!(matches!(
        bob.latent(&latent.id).await,
        Err(Error::LatentNotFound(_))
    ));
    assert!(!bob.release_latent(&latent.id).await);
    let mut spec = picture("a", "me", "");
    spec.work = decode(&latent.id);
    spec.options.reach = Reach::Own("bob".to_owned());
    assert!(matches!(
        queue.submit(spec.clone()).await,
        Err(Error::LatentNotFound(_))
    ));
    assert!(alice.latent(&latent.id).await.is_ok());
    assert!(alice.release_latent(&latent.id).await);

    let mut own = picture("a", "me", "a cat");
    own.options.account = "alice".to_owned();
    own.options.most_jobs = Some(1);
    let job = queue.submit(own.clone()).await.unwrap();
    let cancelled = bob.cancel(&job.id, "me".to_owned()).await;
    assert!(matches!(cancelled, Err(Error::JobNotFound(_))));
    let second = queue.submit(own.clone()).await.unwrap_err();
    assert!(
        matches!(&second, Error::TokenLimit { limit, .. } if limit == "jobs"),
        "{second}"
    );
    own.options.account = "bob".to_owned();
    drop(queue.submit(own).await.unwrap());
    worker.order().await;
    assert!(alice.cancel(&job.id, "me".to_owned()).await.unwrap());

    let minute = Duration::from_secs(60);
    let hold = alice.hold(entry("a"), "me".into(), minute).await.unwrap();
    assert_ne!(bob.hold(entry("a"), "me".into(), minute).await.unwrap(), hold);
    assert!(!bob.release_hold(&hold).await);
    assert!(alice.release_hold(&hold).await);
}
