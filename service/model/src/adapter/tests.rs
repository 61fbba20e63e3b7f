use super::*;

fn curve(points: &[(f32, f32)]) -> StrengthCurve {
    StrengthCurve::of(points.to_vec()).unwrap()
}

#[test]
fn a_curve_is_linear_between_its_points_and_constant_outside() {
    let ramp = curve(&[(0.25, 1.0), (0.75, 0.0)]);
    let strengths: Vec<f32> = (0..5).map(|step| ramp.at(step, 5)).collect();
    assert_eq!(strengths, [1.0, 1.0, 0.5, 0.0, 0.0]);
    assert_eq!(ramp.at(0, 1), 1.0);
    assert_eq!(ramp.first(), 1.0);
    assert!(!ramp.is_constant());
    assert!(!ramp.is_zero());
}

#[test]
fn two_points_at_one_position_are_a_jump() {
    let jump = curve(&[(0.0, 1.0), (0.5, 1.0), (0.5, 0.0)]);
    let strengths: Vec<f32> = (0..5).map(|step| jump.at(step, 5)).collect();
    assert_eq!(strengths, [1.0, 1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn a_constant_strength_is_a_curve_of_one_point() {
    let constant = StrengthCurve::constant(0.7).unwrap();
    assert!(constant.is_constant());
    assert!((0..9).all(|step| constant.at(step, 9) == 0.7));
    assert!(StrengthCurve::constant(0.0).unwrap().is_zero());
    assert!(curve(&[(0.0, 0.0), (1.0, 0.0)]).is_zero());
}

#[test]
fn points_that_are_no_curve_are_refused() {
    let refused = |points: &[(f32, f32)]| StrengthCurve::of(points.to_vec()).unwrap_err();
    assert_eq!(refused(&[]), CurveError::Empty);
    assert_eq!(refused(&[(1.5, 1.0)]), CurveError::Position(1.5));
    assert!(matches!(refused(&[(f32::NAN, 1.0)]), CurveError::Position(_)));
    assert_eq!(refused(&[(0.5, 1.0), (0.25, 1.0)]), CurveError::Order(0.5, 0.25));
    assert_eq!(refused(&[(0.0, 101.0)]), CurveError::Strength(101.0));
    assert!(matches!(
        refused(&[(0.0, f32::INFINITY)]),
        CurveError::Strength(_)
    ));
    assert_eq!(
        refused(&[(0.0, 1.0); MAX_POINTS + 1]),
        CurveError::TooMany(MAX_POINTS + 1)
    );
}
