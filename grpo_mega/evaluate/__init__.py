"""What several sampled answers per problem say about a policy, with intervals; during training and after it."""
