"""Which field of a card belongs to which element of CHAI's model card 0.2 and states which attribute of HTI-1.

The one place of this mapping: completeness, Markdown and `docs/model-card.md` follow it.
"""

from dataclasses import dataclass

# Source attributes of predictive interventions, 45 CFR 170.315(b)(11)(iv)(B), in short.
ATTRIBUTES = {
    "1 i": "name and contact of the developer",
    "1 ii": "funding source",
    "1 iii": "description of the output",
    "1 iv": "kind of output",
    "2 i": "intended use",
    "2 ii": "intended patient population",
    "2 iii": "intended users",
    "2 iv": "intended role in decisions",
    "3 i": "tasks, situations or populations to avoid",
    "3 ii": "known risks and limitations",
    "4 i": "exclusion and inclusion criteria of the training data",
    "4 ii": "use of demographic, social and health-status variables",
    "4 iii": "demographic representativeness",
    "4 iv": "relevance of the training data to the setting",
    "5 i": "approach to fair output",
    "5 ii": "approaches to bias",
    "6 i": "external data source or setting",
    "6 ii": "party that tested externally",
    "6 iii": "demographic representativeness of external data",
    "6 iv": "external validation process",
    "7 i": "validity in test data of the same source",
    "7 ii": "fairness in test data of the same source",
    "7 iii": "validity in external data",
    "7 iv": "fairness in external data",
    "7 v": "references to evaluations of outcomes",
    "8 i": "monitoring of validity",
    "8 ii": "validity in local data",
    "8 iii": "monitoring of fairness",
    "8 iv": "fairness in local data",
    "9 i": "process and frequency of updates",
    "9 ii": "process and frequency of corrections",
}


@dataclass(frozen=True)
class CardField:
    """A field of the card: one of its `statements`, else a path below the card."""

    name: str
    section: str
    chai: str
    attributes: tuple[str, ...] = ()
    is_statement: bool = True


def _facts(path: str, section: str, chai: str, *attributes: str) -> CardField:
    return CardField(path, section, chai, attributes, is_statement=False)


_SYSTEM, _METRICS = "TrustIngredients/AISystemFacts", "KeyMetrics"
# In the order of the card. A field without attributes is not asked for by HTI-1.
FIELDS = (
    _facts("model", "Model", "BasicInfo, ReleaseInfo, AISystemFacts/FoundationModels"),
    CardField("developer", "Model", "BasicInfo/ModelDeveloper", ("1 i",)),
    CardField("contact", "Model", "BasicInfo/DeveloperContact", ("1 i",)),
    CardField(
        "funding", "Model", "TrustIngredients/TransparencyInformation/FundingSource", ("1 ii",)
    ),
    CardField("output", "Model", f"{_SYSTEM}/OutcomesAndOutputs", ("1 iii",)),
    CardField("output_type", "Model", f"{_SYSTEM}/OutputAndInputDataTypes", ("1 iv",)),
    CardField("intended_use", "Use", "UsesAndDirections/IntendedUseAndWorkflow", ("2 i",)),
    CardField(
        "patient_population", "Use", "UsesAndDirections/TargetedPatientPopulation", ("2 ii",)
    ),
    CardField("users", "Use", "UsesAndDirections/PrimaryIntendedUsers", ("2 iii",)),
    CardField("decision_role", "Use", "UsesAndDirections/IntendedUseAndWorkflow", ("2 iv",)),
    CardField("how_to_use", "Use", "UsesAndDirections/HowToUse"),
    CardField(
        "out_of_scope", "Warnings", "UsesAndDirections/CautionedOutOfScopeSettings", ("3 i",)
    ),
    CardField("known_risks", "Warnings", "Warnings/KnownRisksAndLimitations", ("3 ii",)),
    CardField("clinical_risk", "Warnings", "Warnings/ClinicalRiskLevel"),
    _facts("data", "Data", f"{_SYSTEM}/InputDataSource"),
    CardField("inclusion_criteria", "Data", f"{_SYSTEM}/DevelopmentDataCharacterization", ("4 i",)),
    CardField("variables", "Data", f"{_SYSTEM}/InputDataSource", ("4 ii",)),
    CardField(
        "representativeness", "Data", f"{_SYSTEM}/DevelopmentDataCharacterization", ("4 iii",)
    ),
    CardField("relevance", "Data", f"{_SYSTEM}/DevelopmentDataCharacterization", ("4 iv",)),
    _facts("training", "Training", f"{_SYSTEM}/ModelType"),
    _facts("evaluation.slices", "Fairness", f"{_METRICS}/FairnessEquity", "7 ii", "8 iv"),
    CardField("fairness_approach", "Fairness", f"{_METRICS}/FairnessEquity", ("5 i",)),
    CardField("bias_mitigation", "Fairness", f"{_SYSTEM}/BiasMitigationApproaches", ("5 ii",)),
    _facts("evaluation", "Evaluation", f"{_METRICS}/UsefulnessUsabilityEfficacy", "7 i", "8 ii"),
    CardField("external_data", "Evaluation", f"{_METRICS}/UsefulnessUsabilityEfficacy", ("6 i",)),
    CardField("external_party", "Evaluation", f"{_METRICS}/UsefulnessUsabilityEfficacy", ("6 ii",)),
    CardField(
        "external_representativeness",
        "Evaluation",
        f"{_METRICS}/UsefulnessUsabilityEfficacy",
        ("6 iii",),
    ),
    CardField(
        "external_validation", "Evaluation", f"{_METRICS}/UsefulnessUsabilityEfficacy", ("6 iv",)
    ),
    CardField(
        "external_validity", "Evaluation", f"{_METRICS}/UsefulnessUsabilityEfficacy", ("7 iii",)
    ),
    CardField("external_fairness", "Evaluation", f"{_METRICS}/FairnessEquity", ("7 iv",)),
    CardField("references", "Evaluation", "Resources/EvaluationReferences", ("7 v",)),
    _facts("rollout", "Rollout", f"{_METRICS}/SafetyReliability"),
    _facts("privacy", "Privacy", f"{_SYSTEM}/Security"),
    _facts("decisions", "Decisions", f"{_SYSTEM}/Transparency"),
    CardField("monitoring", "Maintenance", f"{_SYSTEM}/OngoingMaintenance", ("8 i",)),
    CardField("fairness_monitoring", "Maintenance", f"{_SYSTEM}/OngoingMaintenance", ("8 iii",)),
    CardField("update_schedule", "Maintenance", f"{_SYSTEM}/OngoingMaintenance", ("9 i",)),
    CardField("correction_process", "Maintenance", f"{_SYSTEM}/OngoingMaintenance", ("9 ii",)),
)
