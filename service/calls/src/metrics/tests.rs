use std::collections::BTreeSet;
use std::time::Duration;

use engine::Error;
use engine::job::{Call, JobEventKind, JobId, JobReport, StageReport};
use engine::queue::{Happening, ObservedJob, Observer as _};
use prometheus_client::encoding::text::encode;
use residency::{Bytes, Component};

use super::*;

/// Everything that is counted happens once.
fn counted() -> Metrics {
    let metrics = Metrics::new();
    let id = JobId::from("job-1");
    let job = ObservedJob {
        id: &id,
        call: Call::GenerateImage,
        model: "small+full",
        client: "test",
        trace: "",
        age: Duration::ZERO,
    };
    let component = Component {
        id: residency::ComponentId("vae-1".into()),
        name: "vae".to_owned(),
        bytes: Bytes::mib(3),
        reload_seconds: 1.0,
        parts: residency::Parts::default(),
    };
    let events = [
        JobEventKind::Accepted { joined: false },
        JobEventKind::Accepted { joined: true },
        JobEventKind::Step {
            n: 1,
            of: 2,
            item: 0,
            section: None,
        },
        JobEventKind::Evicting {
            component: component.clone(),
            card: "sim:0".to_owned(),
        },
        JobEventKind::Retrying {
            reason: "WORKER_DIED".to_owned(),
            message: String::new(),
            stage: "denoise".into(),
        },
    ];
    for event in &events {
        metrics.happened(&Happening::Event { job, event });
    }
    let stage = StageReport {
        name: "denoise".into(),
        run: Duration::from_secs(2),
        moves: Duration::from_millis(500),
        peak_scratch: Bytes::mib(3),
        predicted_scratch: Bytes::mib(2),
        ..StageReport::default()
    };
    metrics.happened(&Happening::Stage { job, report: &stage });
    let cached = StageReport {
        cached: true,
        ..stage
    };
    metrics.happened(&Happening::Stage { job, report: &cached });
    let report = JobReport {
        total: Duration::from_secs(4),
        ..JobReport::default()
    };
    let (failed, cancelled) = (
        Error::Internal(String::new()),
        Error::Cancelled(CancelledBy::Left),
    );
    for result in [Ok(()), Err(&failed), Err(&cancelled)] {
        metrics.happened(&Happening::Ended {
            job,
            report: &report,
            result,
        });
    }
    metrics.happened(&Happening::Waited {
        job,
        cause: "foreign",
        lasted: Duration::from_millis(1500),
    });
    metrics.happened(&Happening::Loaded {
        card: "sim:0",
        bytes: Bytes::mib(8),
        lasted: Duration::from_millis(250),
    });
    metrics.happened(&Happening::Unloaded {
        card: "sim:0",
        freed: &[(
            component,
            gpu::Unloaded {
                booked: Bytes::mib(3),
                freed: Bytes::mib(2),
            },
        )],
    });
    for was_asked_for in [true, false] {
        metrics.happened(&Happening::WorkerLost {
            card: "sim:0",
            was_asked_for,
        });
    }
    metrics.called("http", "GET /v1/models", None);
    metrics.called("grpc", "moored.v1.Jobs/List", Some("ROLE_REQUIRED".to_owned()));
    metrics
}

fn text_of(metrics: &Metrics) -> String {
    let mut text = String::new();
    encode(&mut text, &metrics.registry).unwrap();
    text
}

#[test]
fn everything_that_happens_is_counted_once() {
    let text = text_of(&counted());
    for line in [
        r#"moored_jobs_accepted_total{call="GenerateImage",model="small+full"} 1"#,
        r#"moored_jobs_ended_total{call="GenerateImage",model="small+full",end="done"} 1"#,
        r#"moored_jobs_ended_total{call="GenerateImage",model="small+full",end="failed"} 1"#,
        r#"moored_jobs_ended_total{call="GenerateImage",model="small+full",end="cancelled"} 1"#,
        r#"moored_job_failures_total{reason="INTERNAL"} 1"#,
        r#"moored_job_duration_seconds_sum{call="GenerateImage"} 4.0"#,
        r#"moored_stages_total{stage="denoise",cached="false"} 1"#,
        r#"moored_stages_total{stage="denoise",cached="true"} 1"#,
        r#"moored_stage_duration_seconds_sum{stage="denoise",phase="run"} 2.0"#,
        r#"moored_stage_duration_seconds_sum{stage="denoise",phase="move"} 0.5"#,
        r#"moored_stage_duration_seconds_count{stage="denoise",phase="wait"} 1"#,
        r#"moored_stage_scratch_ratio_sum{stage="denoise"} 1.5"#,
        r#"moored_steps_total{model="small+full"} 1"#,
        r#"moored_waits_total{cause="foreign"} 1"#,
        r#"moored_wait_duration_seconds_total{cause="foreign"} 1.5"#,
        r#"moored_retries_total{reason="WORKER_DIED"} 1"#,
        r#"moored_evictions_total{card="sim:0"} 1"#,
        r#"moored_evicted_bytes_total{card="sim:0"} 3145728"#,
        r#"moored_loads_total{card="sim:0"} 1"#,
        r#"moored_loaded_bytes_total{card="sim:0"} 8388608"#,
        r#"moored_load_duration_seconds_total{card="sim:0"} 0.25"#,
        r#"moored_unloads_total{card="sim:0"} 1"#,
        r#"moored_unloaded_bytes_total{card="sim:0"} 3145728"#,
        r#"moored_unload_left_bytes_total{card="sim:0"} 1048576"#,
        r#"moored_worker_losses_total{card="sim:0",cause="lost"} 1"#,
        r#"moored_worker_losses_total{card="sim:0",cause="replaced"} 1"#,
        r#"moored_calls_total{protocol="http",method="GET /v1/models"} 1"#,
        r#"moored_calls_total{protocol="grpc",method="moored.v1.Jobs/List"} 1"#,
        r#"moored_calls_refused_total{protocol="grpc",method="moored.v1.Jobs/List",reason="ROLE_REQUIRED"} 1"#,
    ] {
        assert!(text.lines().any(|told| told == line), "{line} is not in\n{text}");
    }
}

#[test]
fn every_counter_is_documented() {
    let documented = include_str!("../../../../docs/METRICS.md");
    let text = text_of(&counted());
    let names: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    assert_eq!(names.len(), 22, "{names:?}");
    for name in names {
        assert!(documented.contains(&format!("`{name}`")), "{name}");
    }
}
