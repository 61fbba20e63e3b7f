//! Clients: their requests, and checks of the events that they receive.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::job::{Call, JobEventKind, JobOptions, JobSpec, JobWork, Priority, Reach, Run, Start};
use engine::queue::Job;
use model::{Request, Role};
use rand::Rng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;
use tokio::time::Instant;

use crate::defect::{Defect, Invariant};
use crate::models::{Models, NAMES, request};
use crate::slot::{Broken, Records, STALE_BYTE};

/// State shared by all clients.
#[derive(Default)]
pub(crate) struct ClientResults {
    pub(crate) broken: Option<Broken>,
    /// Outcomes of jobs, by count.
    pub(crate) ends: BTreeMap<String, u64>,
    /// Kept latents, and the pictures that they decode to.
    pub(crate) latents: Vec<(String, bytes::Bytes)>,
}

pub(crate) type SharedClientResults = Arc<Mutex<ClientResults>>;

/// A job, and its expected pictures, by item.
pub(crate) struct ExpectedJob {
    pub(crate) spec: JobSpec,
    pub(crate) pictures: Vec<bytes::Bytes>,
}

pub(crate) fn random_job(
    models: &Models,
    heard: &ClientResults,
    random: &mut ChaCha8Rng,
    painted: &mut BTreeMap<String, bytes::Bytes>,
) -> ExpectedJob {
    let name = if random.random_ratio(2, 3) {
        NAMES[random.random_range(0..2)]
    } else {
        *NAMES.choose(random).unwrap()
    };
    let from_image = random.random_ratio(1, 6);
    let (prompt, steps) = (
        format!("prompt {}", random.random_range(0..5)),
        random.random_range(1..4),
    );
    let mut request = request(&prompt, steps, random.random_range(0..4), from_image);
    if random.random_ratio(1, 3) {
        request.slots = random.random_range(2..4);
    }
    if random.random_ratio(1, 4) {
        request.cards = 2; // refused where there is one card
    }
    let mut expected_picture = |request: &Request| {
        let key = format!("{prompt} {steps} {} {from_image}", request.seed);
        painted
            .entry(key)
            .or_insert_with(|| models.expected_picture(request))
            .clone()
    };
    let (work, pictures) = match random.random_range(0..12) {
        0 => (
            JobWork::Load {
                components: Vec::new(),
                replace: None,
                prove: false,
            },
            Vec::new(),
        ),
        1 => {
            let components = vec!["transformer".to_owned(), "vae".to_owned()];
            (
                JobWork::Load {
                    components,
                    replace: None,
                    prove: false,
                },
                Vec::new(),
            )
        }
        2 if from_image => {
            let run = Run {
                call: Call::EncodeImage,
                until: Role::Encode,
                keep_latent: true,
                ..run_of(request)
            };
            (JobWork::Run(run), Vec::new())
        }
        3 | 4 if !heard.latents.is_empty() => {
            let (latent, picture) = heard.latents.choose(random).unwrap().clone();
            let start = Start {
                latent,
                role: Role::Decode,
            };
            let run = Run {
                call: Call::DecodeLatent,
                start: Some(start),
                ..run_of(request)
            };
            (JobWork::Run(run), vec![picture])
        }
        _ => {
            let count = random.random_range(1..3);
            let keep_latent = random.random_ratio(1, 3);
            let latent_only = random.random_ratio(1, 12);
            let pictures = (0..count).map(|item| expected_picture(&request.of_item(item)));
            let pictures = pictures.collect();
            let run = Run {
                count,
                keep_latent,
                until: if latent_only { Role::Sample } else { Role::Decode },
                ..run_of(request)
            };
            (JobWork::Run(run), pictures)
        }
    };
    let options = random_options(random);
    let entry = models.entry(name);
    let spec = JobSpec { options, entry, work };
    ExpectedJob { spec, pictures }
}

/// A picture of a request.
fn run_of(request: Request) -> Run {
    Run {
        call: Call::GenerateImage,
        request,
        count: 1,
        start: None,
        until: Role::Decode,
        keep_latent: false,
        preview_interval_ms: 0,
    }
}

fn random_options(random: &mut ChaCha8Rng) -> JobOptions {
    let deadline = random.random_ratio(1, 6).then(|| random.random_range(0..20_000));
    let patience = random.random_ratio(1, 4).then(|| random.random_range(0..10_000));
    JobOptions {
        id: None,
        reach: Reach::All,
        most_jobs: None,
        account: String::new(),
        client: ["x", "y", "z"].choose(random).copied().unwrap().into(),
        priority: *[Priority::Low, Priority::Normal, Priority::High]
            .choose(random)
            .unwrap(),
        patience: patience.map(Duration::from_millis),
        allow_low_memory: random.random_ratio(1, 6),
        headroom: residency::Bytes::mib([0, 0, 0, 100][random.random_range(0..4)]),
        card_hint: if random.random_ratio(1, 10) { "sim:1" } else { "" }.into(),
        idempotency_key: if random.random_ratio(1, 8) { "key" } else { "" }.into(),
        detach: random.random_ratio(1, 10),
        deadline: deadline.map(|ms| Instant::now() + Duration::from_millis(ms)),
        trace: String::new(),
    }
}

/// Listens to a job for this many events, and to its end otherwise.
pub(crate) async fn listen(
    mut job: Job,
    pictures: Vec<bytes::Bytes>,
    for_events: usize,
    records: Arc<Mutex<Records>>,
    ears: SharedClientResults,
    defect: Defect,
) {
    let mut ends = 0;
    let mut painted = 0;
    let mut broken: Option<Broken> = None;
    let mut found = |invariant: Invariant, what: String| {
        broken.get_or_insert((invariant, what));
    };
    for _ in 0..for_events {
        let Some(event) = job.next().await else { break };
        if ends > 0 {
            found(
                Invariant::EveryJobEndsOnce,
                format!("after its end, {:?}", event.kind),
            );
        }
        match event.kind {
            JobEventKind::Done(report) => {
                ends += 1 + u32::from(defect == Defect::EndsTwice);
                let ran = report.stages.iter().filter(|stage| !stage.cached).count();
                let completed = records.lock().unwrap().completed.get(&*job.id).copied();
                if ran > completed.unwrap_or_default() {
                    let what = format!("{ran} stages are said to have run, {completed:?} did");
                    found(Invariant::NoStaleResultCounts, what);
                }
                *ears.lock().unwrap().ends.entry("Done".to_owned()).or_default() += 1;
            }
            JobEventKind::Failed(error) => {
                ends += 1;
                let name = format!("{error:?}");
                let name = name.split(['(', ' ']).next().unwrap_or_default().to_owned();
                *ears.lock().unwrap().ends.entry(name).or_default() += 1;
            }
            JobEventKind::Piece { piece, item, .. } => {
                painted += 1;
                let (rgb, picture) = (&piece.data, item);
                if rgb.iter().all(|&number| number == STALE_BYTE) {
                    let what = "a picture that a dead worker painted".to_owned();
                    found(Invariant::NoStaleResultCounts, what);
                } else if pictures
                    .get(picture as usize)
                    .is_some_and(|expected| expected[..] != rgb[..])
                {
                    let what = format!("picture {picture} is of colour {:?}", &rgb[..3]);
                    found(Invariant::PicturesEqualReference, what);
                }
            }
            JobEventKind::Latent { info, item } => {
                if let Some(expected) = pictures.get(item as usize) {
                    let mut ears = ears.lock().unwrap();
                    ears.latents.push((info.id, expected.clone()));
                }
            }
            JobEventKind::Accepted { .. }
            | JobEventKind::Queued { .. }
            | JobEventKind::Waiting { .. }
            | JobEventKind::Evicting { .. }
            | JobEventKind::Loading { .. }
            | JobEventKind::Retrying { .. }
            | JobEventKind::Stage { .. }
            | JobEventKind::Step { .. }
            | JobEventKind::Preview { .. } => {}
        }
    }
    if for_events == usize::MAX && ends != 1 {
        let what = format!("{ends} ends after {painted} pictures");
        found(Invariant::EveryJobEndsOnce, what);
    }
    if broken.is_some() {
        ears.lock().unwrap().broken.get_or_insert(broken.take().unwrap());
    }
}
